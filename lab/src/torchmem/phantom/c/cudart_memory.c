/* Stands in for libcudart: device memory, pinned memory, copies. Copies from a GPU are zero. */
#include "cudart.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Simulates a driver that hangs: cudaMalloc does not return while the file named by PHANTOM_HOLD
 * exists. */
static void wait_while_held(void)
{
    const char *path = getenv("PHANTOM_HOLD");
    while (path && access(path, F_OK) == 0)
        usleep(1000);
}

static cudaError_t device_malloc(void **pointer, size_t size)
{
    wait_while_held();
    int device = current_device(), gpu = gpu_of(device);
    cudaError_t error = enter(device);
    *pointer = NULL;
    if (error || size == 0)
        return error;
    if (!process_take(gpu, size, gpu_bytes()))
        return cudaErrorMemoryAllocation;
    *pointer = reserve_addresses(size);
    if (!*pointer) {
        process_give(gpu, size);
        return cudaErrorMemoryAllocation;
    }
    uintptr_t start = (uintptr_t)*pointer;
    add_range((struct range){.start = start, .end = start + size, .kind = DEVICE_MALLOC, .device = device});
    return cudaSuccess;
}

/* Returns the freed bytes, or 0 if the pointer is not the start of an allocation. */
static size_t device_free(void *pointer)
{
    struct range range;
    if (!remove_range(pointer, &range) || range.kind != DEVICE_MALLOC)
        return 0;
    size_t size = range.end - range.start;
    release_addresses(pointer, size);
    process_give(gpu_of(range.device), size);
    return size;
}

cudaError_t cudaMalloc(void **pointer, size_t size) { return record_error(device_malloc(pointer, size)); }

cudaError_t cudaFree(void *pointer)
{
    if (!pointer) /* a common way to create the context */
        return record_error(enter(current_device()));
    cudaError_t error = unsafe_in_captures();
    if (error)
        return record_error(error);
    return record_error(device_free(pointer) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    int device = current_device();
    cudaError_t error = enter(device);
    if (error)
        return record_error(error);
    *total = gpu_bytes();
    *free_bytes = gpu_free_bytes(gpu_of(device));
    return cudaSuccess;
}

/* The driver's own pool (backend:cudaMallocAsync), which caches nothing here. */
static struct CUmemPoolHandle_st {
    uint64_t used, high;
} pools[MAX_GPUS];
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;

static void count_in_pool(int device, int64_t bytes)
{
    struct CUmemPoolHandle_st *pool = &pools[device];
    pthread_mutex_lock(&pool_lock);
    pool->used += (uint64_t)bytes;
    pool->high = pool->used > pool->high ? pool->used : pool->high;
    pthread_mutex_unlock(&pool_lock);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    *pool = &pools[device];
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream)
{
    (void)stream;
    cudaError_t error = device_malloc(pointer, size);
    if (!error)
        count_in_pool(current_device(), (int64_t)size);
    return record_error(error);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    (void)stream;
    struct range range = {.device = 0};
    find_range(pointer, &range);
    size_t size = device_free(pointer);
    count_in_pool(range.device, -(int64_t)size);
    return record_error(size ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, int attribute, void *value)
{
    switch (attribute) {
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent: *(uint64_t *)value = pool->used; return cudaSuccess;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh: *(uint64_t *)value = pool->high; return cudaSuccess;
    default: return record_error(unsupported("cudaMemPoolGetAttribute", cudaErrorNotSupported));
    }
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, int attribute, void *value)
{
    (void)value;
    if (attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh)
        pool->high = pool->used;
    return cudaSuccess;
}

/* Memory that a graph allocates itself, which graphs never do here. PyTorch calls it since 2.15. */
cudaError_t cudaDeviceGetGraphMemAttribute(int device, int attribute, void *value)
{
    (void)device, (void)attribute;
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

SUCCEED(cudaDeviceSetGraphMemAttribute)
SUCCEED(cudaMemPoolSetAccess)
SUCCEED(cudaMemPoolTrimTo)

static cudaError_t pin(void *pointer, size_t size, enum kind kind)
{
    uintptr_t start = (uintptr_t)pointer;
    struct range range = {.start = start, .end = start + size, .kind = kind, .device = current_device()};
    return add_range(range) ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered;
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags)
{
    (void)flags;
    cudaError_t error = enter(current_device());
    if (error)
        return record_error(error);
    *pointer = aligned_alloc(4096, (size + 4095) & ~(size_t)4095);
    return record_error(*pointer ? pin(*pointer, size, HOST_PINNED) : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *pointer)
{
    struct range range;
    if (pointer && (!remove_range(pointer, &range) || range.kind != HOST_PINNED))
        return record_error(cudaErrorInvalidValue);
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags)
{
    (void)flags;
    return record_error(pin(pointer, size, HOST_REGISTERED));
}

cudaError_t cudaHostUnregister(void *pointer)
{
    struct range range;
    return record_error(remove_range(pointer, &range) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

/* Host and GPU use the same addresses. */
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    (void)flags;
    *device = host;
    return record_error(find_range(host, &(struct range){0}) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    struct range range;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDevice;
    if (!find_range(pointer, &range))
        return cudaSuccess;
    bool device = range.kind <= DEVICE_MAPPED;
    attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = range.device;
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = device ? NULL : (void *)pointer;
    return cudaSuccess;
}

static atomic_ullong values_read;

/* For preflight, through ctypes: number of reads from a GPU by the host. */
unsigned long long phantom_values_read(void) { return values_read; }

/* The pointers decide, not the given kind, because the host must never access device addresses. */
static cudaError_t copy(void *to, const void *from, size_t size)
{
    bool from_device = on_device(from), to_device = on_device(to);
    if (from_device && to_device)
        copy_write(to, from, size), copy_value(to, from, size);
    else if (to_device)
        keep_write(to, from, size);
    else if (from_device) {
        values_read++;
        read_back(to, from, size);
        read_value(to, from, size);
    } else
        memmove(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, int kind)
{
    (void)kind;
    return copy(to, from, size);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, int kind,
                            cudaStream_t stream)
{
    (void)kind, (void)stream;
    return copy(to, from, size);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, int kind, cudaStream_t stream)
{
    (void)kind, (void)stream;
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

WORK(cudaMemcpyPeerAsync)
SUCCEED(cudaMemcpyToSymbol)

cudaError_t cudaMemset(void *device, int byte, size_t size)
{
    (void)byte;
    forget_writes();
    forget_value(device, size);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *device, int byte, size_t size, cudaStream_t stream)
{
    (void)stream;
    return cudaMemset(device, byte, size);
}
