/* Stands in for libcuda.so.1: devices, contexts, pointers. */
#include "cudart.h"

#include <stdio.h>

CUresult cuInit(unsigned flags)
{
    (void)flags;
    return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = cudaGetErrorString(error);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = cudaGetErrorName(error);
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *name, void **entry, int version, uint64_t flags, int *status)
{
    (void)version, (void)flags;
    *entry = driver_entry(name);
    if (status)
        *status = *entry ? ENTRY_FOUND : ENTRY_NOT_FOUND;
    return *entry ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* NVIDIA's private interface between its libraries; NVRTC asks for it and works without it. */
CUresult cuGetExportTable(const void **table, const void *id)
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
    return gpu_of(index) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    (void)device;
    snprintf(name, (size_t)length, "%s", model()->name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], CUdevice device)
{
    gpu_uuid(gpu_of(device), uuid);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    (void)device;
    *bytes = gpu_bytes();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    if (gpu_of(device) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    return device_attribute(attribute, gpu_of(device), value) ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

/* The primary context of a device is any address that is unique to it. */
static char contexts[MAX_GPUS];

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = gpu_of(device) >= 0 && process_bytes(gpu_of(device)) > 0;
    return gpu_of(device) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = (CUcontext)&contexts[device];
    return enter(device);
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    int device = current_device();
    *context = process_bytes(gpu_of(device)) > 0 ? (CUcontext)&contexts[device] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    *device = current_device();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    return context ? cudaSetDevice((int)((char *)context - contexts)) : CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr address)
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

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
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

WORK(cuMemsetD32Async)
/* The driver's log, which PyTorch 2.15 reads. It is always empty. */
SUCCEED(cuLogsRegisterCallback)
SUCCEED(cuLogsUnregisterCallback)
