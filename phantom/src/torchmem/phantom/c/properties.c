/* Stands in for libcudart: what a card says about itself. It is like an H100 without links to other GPUs. */
#include "cudart.h"

#include <cuda.h>
#include <stdio.h>

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    int card = card_of(device);
    if (card < 0)
        return answer(cudaErrorInvalidDevice);
    *p = (struct cudaDeviceProp){
        .name = CARD_NAME, .totalGlobalMem = card_bytes(), .major = 9, .minor = 0, .multiProcessorCount = 132,
        .sharedMemPerBlock = 48 << 10, .sharedMemPerBlockOptin = 227 << 10,
        .sharedMemPerMultiprocessor = 228 << 10, .reservedSharedMemPerBlock = 1 << 10, .warpSize = 32,
        .regsPerBlock = 65536, .regsPerMultiprocessor = 65536, .memPitch = 2147483647,
        .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32, .totalConstMem = 64 << 10, .textureAlignment = 512,
        .texturePitchAlignment = 32, .surfaceAlignment = 512, .l2CacheSize = 50 << 20, .memoryBusWidth = 5120,
        .asyncEngineCount = 3, .concurrentKernels = 1, .canMapHostMemory = 1, .unifiedAddressing = 1,
        .streamPrioritiesSupported = 1, .cooperativeLaunch = 1, .clusterLaunch = 1,
        .hostRegisterSupported = 1, .memoryPoolsSupported = 1, .pciBusID = card + 1,
    };
    card_uuid(card, (unsigned char *)p->uuid.bytes);
    return cudaSuccess;
}

#define IS(name, value) {CU_DEVICE_ATTRIBUTE_##name, value}
#define LACKS(name) {CU_DEVICE_ATTRIBUTE_##name, 0}

static const int attributes[][2] = {
    IS(MAX_THREADS_PER_BLOCK, 1024), IS(MAX_BLOCK_DIM_X, 1024), IS(MAX_BLOCK_DIM_Y, 1024),
    IS(MAX_BLOCK_DIM_Z, 64), IS(MAX_GRID_DIM_X, 2147483647), IS(MAX_GRID_DIM_Y, 65535),
    IS(MAX_GRID_DIM_Z, 65535), IS(MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10),
    IS(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10),
    IS(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10), IS(RESERVED_SHARED_MEMORY_PER_BLOCK, 1 << 10),
    IS(TOTAL_CONSTANT_MEMORY, 64 << 10), IS(MAX_REGISTERS_PER_BLOCK, 65536),
    IS(MAX_REGISTERS_PER_MULTIPROCESSOR, 65536), IS(MULTIPROCESSOR_COUNT, 132),
    IS(MAX_THREADS_PER_MULTIPROCESSOR, 2048), IS(MAX_BLOCKS_PER_MULTIPROCESSOR, 32), IS(WARP_SIZE, 32),
    IS(COMPUTE_CAPABILITY_MAJOR, 9), IS(COMPUTE_CAPABILITY_MINOR, 0), IS(CLOCK_RATE, 1980000),
    IS(MEMORY_CLOCK_RATE, 2619000), IS(GLOBAL_MEMORY_BUS_WIDTH, 5120), IS(L2_CACHE_SIZE, 50 << 20),
    IS(TEXTURE_ALIGNMENT, 512), IS(TEXTURE_PITCH_ALIGNMENT, 32), IS(ASYNC_ENGINE_COUNT, 3),
    IS(CONCURRENT_KERNELS, 1), IS(UNIFIED_ADDRESSING, 1), IS(CAN_MAP_HOST_MEMORY, 1),
    IS(HOST_REGISTER_SUPPORTED, 1), IS(STREAM_PRIORITIES_SUPPORTED, 1), IS(COOPERATIVE_LAUNCH, 1),
    IS(CLUSTER_LAUNCH, 1), IS(MEMORY_POOLS_SUPPORTED, 1), IS(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1),
    LACKS(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED), LACKS(HANDLE_TYPE_FABRIC_SUPPORTED),
    LACKS(MULTICAST_SUPPORTED), LACKS(GPU_DIRECT_RDMA_SUPPORTED),
    LACKS(GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED), LACKS(DMA_BUF_SUPPORTED), LACKS(IPC_EVENT_SUPPORTED),
    LACKS(INTEGRATED), LACKS(COMPUTE_MODE), LACKS(ECC_ENABLED), LACKS(MANAGED_MEMORY),
    LACKS(CONCURRENT_MANAGED_ACCESS), LACKS(PAGEABLE_MEMORY_ACCESS), LACKS(HOST_NATIVE_ATOMIC_SUPPORTED),
    LACKS(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM), LACKS(PCI_DOMAIN_ID), LACKS(PCI_DEVICE_ID),
};

/* 0 and the value, or -1 where a number would have to be invented. */
int device_attribute(int attribute, int card, int *value)
{
    for (size_t row = 0; row < sizeof attributes / sizeof *attributes; row++)
        if (attributes[row][0] == attribute) {
            *value = attributes[row][1];
            return 0;
        }
    if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
        *value = card + 1;
        return 0;
    }
    char call[64];
    snprintf(call, sizeof call, "device attribute %d", attribute);
    return unsupported(call, -1);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    if (card_of(device) < 0)
        return answer(cudaErrorInvalidDevice);
    bool lacking = device_attribute((int)attribute, card_of(device), value);
    return answer(lacking ? cudaErrorNotSupported : cudaSuccess);
}
