/* Stands in for libcudart and libcuda: properties of a GPU. Clocks and bus width are those of an
 * H100 on every GPU, because no memory size depends on them. */
#include "cudart.h"

#include <stdio.h>
#include <string.h>

/* CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory in
 * KiB, per multiprocessor, per block with opt-in, and reserved per block by the system. */
struct generation {
    int capability, threads, blocks, shared, shared_of_block, shared_reserved;
};
static const struct generation generations[] = {
    {70, 2048, 32, 96, 96, 0},   {75, 1024, 16, 64, 64, 0},   {80, 2048, 32, 164, 163, 1},
    {86, 1536, 16, 100, 99, 1},  {87, 1536, 16, 164, 163, 1}, {89, 1536, 24, 100, 99, 1},
    {90, 2048, 32, 228, 227, 1}, {120, 1536, 24, 100, 99, 1},
};

/* Compute capability 10 equals 9 in all of these, so values between two rows are those of the
 * lower one. */
static const struct generation *generation(void)
{
    size_t row = sizeof generations / sizeof *generations - 1;
    while (row > 0 && generations[row].capability > model()->capability)
        row--;
    return &generations[row];
}

static bool from(int capability) { return model()->capability >= capability; }

#define IS(name, number) \
    case CU_DEVICE_ATTRIBUTE_##name: *value = number; return 0;
#define LACKS(name) IS(name, 0)

/* Returns 0 and the value, or -1 where it would have to be invented. */
int device_attribute(int attribute, int gpu, int *value)
{
    switch (attribute) {
        IS(MAX_THREADS_PER_BLOCK, 1024)
        IS(MAX_BLOCK_DIM_X, 1024)
        IS(MAX_BLOCK_DIM_Y, 1024)
        IS(MAX_BLOCK_DIM_Z, 64)
        IS(MAX_GRID_DIM_X, 2147483647)
        IS(MAX_GRID_DIM_Y, 65535)
        IS(MAX_GRID_DIM_Z, 65535)
        IS(MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10)
        IS(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, generation()->shared_of_block << 10)
        IS(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, generation()->shared << 10)
        IS(RESERVED_SHARED_MEMORY_PER_BLOCK, generation()->shared_reserved << 10)
        IS(TOTAL_CONSTANT_MEMORY, 64 << 10)
        IS(MAX_REGISTERS_PER_BLOCK, 65536)
        IS(MAX_REGISTERS_PER_MULTIPROCESSOR, 65536)
        IS(MULTIPROCESSOR_COUNT, model()->multiprocessors)
        IS(MAX_THREADS_PER_MULTIPROCESSOR, generation()->threads)
        IS(MAX_BLOCKS_PER_MULTIPROCESSOR, generation()->blocks)
        IS(WARP_SIZE, 32)
        IS(MAX_PITCH, 2147483647)
        IS(COMPUTE_CAPABILITY_MAJOR, model()->capability / 10)
        IS(COMPUTE_CAPABILITY_MINOR, model()->capability % 10)
        IS(CLOCK_RATE, 1980000)
        IS(MEMORY_CLOCK_RATE, 2619000)
        IS(GLOBAL_MEMORY_BUS_WIDTH, 5120)
        IS(L2_CACHE_SIZE, model()->l2_bytes)
        IS(TEXTURE_ALIGNMENT, 512)
        IS(TEXTURE_PITCH_ALIGNMENT, 32)
        IS(SURFACE_ALIGNMENT, 512)
        IS(ASYNC_ENGINE_COUNT, 3)
        IS(CONCURRENT_KERNELS, 1)
        IS(GPU_OVERLAP, 1)
        IS(UNIFIED_ADDRESSING, 1)
        IS(CAN_MAP_HOST_MEMORY, 1)
        IS(HOST_REGISTER_SUPPORTED, 1)
        IS(STREAM_PRIORITIES_SUPPORTED, 1)
        IS(COOPERATIVE_LAUNCH, 1)
        IS(CLUSTER_LAUNCH, from(90))
        IS(TENSOR_MAP_ACCESS_SUPPORTED, from(90))
        IS(MEMORY_POOLS_SUPPORTED, 1)
        IS(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1)
        IS(PCI_BUS_ID, gpu + 1)
        LACKS(PCI_DOMAIN_ID)
        LACKS(PCI_DEVICE_ID)
        LACKS(INTEGRATED)
        LACKS(COMPUTE_MODE)
        LACKS(ECC_ENABLED)
        LACKS(TCC_DRIVER)
        LACKS(KERNEL_EXEC_TIMEOUT)
        LACKS(MULTI_GPU_BOARD)
        LACKS(MANAGED_MEMORY)
        LACKS(CONCURRENT_MANAGED_ACCESS)
        LACKS(PAGEABLE_MEMORY_ACCESS)
        LACKS(HOST_NATIVE_ATOMIC_SUPPORTED)
        LACKS(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)
        LACKS(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        LACKS(HANDLE_TYPE_FABRIC_SUPPORTED)
        LACKS(MULTICAST_SUPPORTED)
        LACKS(GPU_DIRECT_RDMA_SUPPORTED)
        LACKS(GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
        LACKS(DMA_BUF_SUPPORTED)
        LACKS(IPC_EVENT_SUPPORTED)
    }
    char call[64];
    snprintf(call, sizeof call, "device attribute %d", attribute);
    return unsupported(call, -1);
}

static int shown(int attribute, int gpu)
{
    int value = 0;
    device_attribute(attribute, gpu, &value);
    return value;
}

#define OF(name) shown(CU_DEVICE_ATTRIBUTE_##name, gpu)
#define SIZE_OF(name) (size_t) OF(name)

/* Fields of both layouts. */
#define FILL(type)                                                                                         \
    (type)                                                                                                 \
    {                                                                                                      \
        .totalGlobalMem = gpu_bytes(), .major = OF(COMPUTE_CAPABILITY_MAJOR),                             \
        .minor = OF(COMPUTE_CAPABILITY_MINOR), .multiProcessorCount = OF(MULTIPROCESSOR_COUNT),            \
        .sharedMemPerBlock = SIZE_OF(MAX_SHARED_MEMORY_PER_BLOCK),                                         \
        .sharedMemPerBlockOptin = SIZE_OF(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),                              \
        .sharedMemPerMultiprocessor = SIZE_OF(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),                       \
        .reservedSharedMemPerBlock = SIZE_OF(RESERVED_SHARED_MEMORY_PER_BLOCK), .warpSize = OF(WARP_SIZE), \
        .regsPerBlock = OF(MAX_REGISTERS_PER_BLOCK), .memPitch = SIZE_OF(MAX_PITCH),                       \
        .regsPerMultiprocessor = OF(MAX_REGISTERS_PER_MULTIPROCESSOR),                                     \
        .maxThreadsPerBlock = OF(MAX_THREADS_PER_BLOCK),                                                   \
        .maxThreadsDim = {OF(MAX_BLOCK_DIM_X), OF(MAX_BLOCK_DIM_Y), OF(MAX_BLOCK_DIM_Z)},                  \
        .maxGridSize = {OF(MAX_GRID_DIM_X), OF(MAX_GRID_DIM_Y), OF(MAX_GRID_DIM_Z)},                       \
        .maxThreadsPerMultiProcessor = OF(MAX_THREADS_PER_MULTIPROCESSOR),                                 \
        .maxBlocksPerMultiProcessor = OF(MAX_BLOCKS_PER_MULTIPROCESSOR),                                   \
        .totalConstMem = SIZE_OF(TOTAL_CONSTANT_MEMORY), .textureAlignment = SIZE_OF(TEXTURE_ALIGNMENT),   \
        .texturePitchAlignment = SIZE_OF(TEXTURE_PITCH_ALIGNMENT),                                         \
        .surfaceAlignment = SIZE_OF(SURFACE_ALIGNMENT), .l2CacheSize = OF(L2_CACHE_SIZE),                  \
        .memoryBusWidth = OF(GLOBAL_MEMORY_BUS_WIDTH), .asyncEngineCount = OF(ASYNC_ENGINE_COUNT),         \
        .concurrentKernels = OF(CONCURRENT_KERNELS), .canMapHostMemory = OF(CAN_MAP_HOST_MEMORY),          \
        .unifiedAddressing = OF(UNIFIED_ADDRESSING),                                                       \
        .streamPrioritiesSupported = OF(STREAM_PRIORITIES_SUPPORTED),                                      \
        .cooperativeLaunch = OF(COOPERATIVE_LAUNCH), .clusterLaunch = OF(CLUSTER_LAUNCH),                  \
        .hostRegisterSupported = OF(HOST_REGISTER_SUPPORTED),                                              \
        .memoryPoolsSupported = OF(MEMORY_POOLS_SUPPORTED), .pciBusID = OF(PCI_BUS_ID),                    \
    }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp13 *properties, int device)
{
    int gpu = gpu_of(device);
    if (gpu < 0)
        return record_error(cudaErrorInvalidDevice);
    *properties = FILL(struct cudaDeviceProp13);
    strcpy(properties->name, model()->name);
    gpu_uuid(gpu, properties->uuid);
    return cudaSuccess;
}

/* The form of CUDA 12. */
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp12 *properties, int device)
{
    int gpu = gpu_of(device);
    if (gpu < 0)
        return record_error(cudaErrorInvalidDevice);
    *properties = FILL(struct cudaDeviceProp12);
    properties->clockRate = OF(CLOCK_RATE);
    properties->memoryClockRate = OF(MEMORY_CLOCK_RATE);
    properties->deviceOverlap = OF(GPU_OVERLAP);
    strcpy(properties->name, model()->name);
    gpu_uuid(gpu, properties->uuid);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    if (gpu_of(device) < 0)
        return record_error(cudaErrorInvalidDevice);
    bool lacking = device_attribute(attribute, gpu_of(device), value);
    return record_error(lacking ? cudaErrorNotSupported : cudaSuccess);
}
