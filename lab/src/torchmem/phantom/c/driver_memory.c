/* Stands in for libcuda.so.1: the virtual memory behind expandable segments. */
#include "cudart.h"

#include <stdlib.h>

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       int flags)
{
    (void)properties, (void)flags;
    *bytes = PAGE_BYTES;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags)
{
    (void)wish, (void)flags;
    if (size == 0 || size % PAGE_BYTES || alignment > PAGE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    *start = (CUdeviceptr)reserve_addresses(size);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t size)
{
    release_addresses((void *)start, size);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags)
{
    (void)flags;
    int device = properties->location.id;
    if (gpu_of(device) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC || size % PAGE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    if (enter(device) || !process_take(gpu_of(device), size, gpu_bytes()))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct physical *physical = malloc(sizeof *physical);
    *physical = (struct physical){.device = device, .size = size, .users = 1};
    *handle = (CUmemGenericAllocationHandle)physical;
    return CUDA_SUCCESS;
}

/* The handle and each mapping are users of the memory; it is freed with the last of them. */
static void drop(struct physical *physical)
{
    if (__atomic_sub_fetch(&physical->users, 1, __ATOMIC_ACQ_REL))
        return;
    process_give(gpu_of(physical->device), physical->size);
    free(physical);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    drop((struct physical *)handle);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    (void)flags;
    struct physical *physical = (struct physical *)handle;
    struct range range = {.start = start,
                          .end = start + size,
                          .kind = DEVICE_MAPPED,
                          .device = physical->device,
                          .physical = physical};
    if (offset + size > physical->size || !add_range(range))
        return CUDA_ERROR_INVALID_VALUE;
    __atomic_add_fetch(&physical->users, 1, __ATOMIC_ACQ_REL);
    return CUDA_SUCCESS;
}

SUCCEED(cuMemSetAccess)

CUresult cuMemUnmap(CUdeviceptr start, size_t size)
{
    for (CUdeviceptr end = start + size; start < end;) {
        struct range range;
        if (!remove_range((void *)start, &range) || !range.physical || range.end > end)
            return CUDA_ERROR_INVALID_VALUE;
        start = range.end;
        drop(range.physical);
    }
    return CUDA_SUCCESS;
}
