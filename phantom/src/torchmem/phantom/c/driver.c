/* Stands in for libcuda.so.1: devices, contexts, pointers, and modules that do nothing. */
#include "cudart.h"

#include <cuda.h>
#include <string.h>

CUresult cuInit(unsigned flags)
{
    (void)flags;
    return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) { return (CUresult)cudaDriverGetVersion(version); }

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **entry, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status)
{
    (void)version, (void)flags;
    *entry = driver_entry(name);
    if (status)
        *status = *entry ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *entry ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* NVIDIA's private interface between its libraries; nvrtc asks for it and goes on without. */
CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuDeviceGetCount(int *count)
{
    *count = device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int index)
{
    *device = index;
    return card_of(index) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    (void)device;
    strncpy(name, CARD_NAME, (size_t)length);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    card_uuid(card_of(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    (void)device;
    *bytes = card_bytes();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    if (card_of(device) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    return device_attribute((int)attribute, card_of(device), value) ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

/* A device's primary context is any address that is its own. */
static char contexts[MAX_CARDS];

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = card_of(device) >= 0 && process_bytes(card_of(device)) > 0;
    return card_of(device) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = (CUcontext)&contexts[device];
    return (CUresult)enter(device);
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    int device = current_device();
    *context = process_bytes(card_of(device)) > 0 ? (CUcontext)&contexts[device] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    return context ? (CUresult)cudaSetDevice((int)((char *)context - contexts)) : CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *size, CUdeviceptr address)
{
    struct range range;
    if (!find_range((void *)address, &range))
        return CUDA_ERROR_INVALID_VALUE;
    if (start)
        *start = range.start;
    if (size)
        *size = range.end - range.start;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    struct range range;
    if (!find_range((void *)address, &range))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = range.device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = (CUcontext)&contexts[range.device];
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = range.start; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = range.end - range.start; return CUDA_SUCCESS;
    default: return unsupported("cuPointerGetAttribute", CUDA_ERROR_NOT_SUPPORTED);
    }
}

/* Kernels that PyTorch compiles at run time: a module and its functions are any non-null handle. */
CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    *module = (CUmodule)image;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    (void)name;
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int block_size,
                                                     size_t shared)
{
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size,
                                                                            shared, 0);
}

SUCCEED(cuModuleUnload)
SUCCEED(cuLaunchKernel)
SUCCEED(cuLaunchCooperativeKernel)
SUCCEED(cuFuncSetAttribute)
SUCCEED(cuFuncSetCacheConfig)
SUCCEED(cuMemsetD32Async)
/* The descriptor it would fill is read by kernels only. */
SUCCEED(cuTensorMapEncodeTiled)
