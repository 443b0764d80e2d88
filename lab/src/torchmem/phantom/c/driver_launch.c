/* Stands in for libcuda.so.1: modules, libraries, functions and their launch, as used by Triton,
 * Inductor and NVRTC. Kernels compute nothing, so a module, a function and a kernel are any handle
 * that is not null. */
#include "cudart.h"

/* The remaining arguments are options, which are ignored. */
#define LOAD(name)                                       \
    CUresult name(const void **module, const void *code) \
    {                                                    \
        *module = code;                                  \
        return CUDA_SUCCESS;                             \
    }

LOAD(cuModuleLoadData)
LOAD(cuModuleLoadDataEx)
LOAD(cuModuleLoadFatBinary)
LOAD(cuModuleLoad)
LOAD(cuLibraryLoadData)
LOAD(cuLibraryLoadFromFile)
LOAD(cuLibraryGetModule)
LOAD(cuKernelGetFunction)

#define FIND(name)                                                               \
    CUresult name(const void **function, const void *module, const char *wanted) \
    {                                                                            \
        (void)wanted;                                                            \
        *function = module;                                                      \
        return CUDA_SUCCESS;                                                     \
    }

FIND(cuModuleGetFunction)
FIND(cuLibraryGetKernel)

static CUresult most_shared(int *bytes)
{
    int gpu = gpu_of(current_device());
    bool lacks = device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, gpu, bytes);
    return lacks ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

/* Values by CUfunction_attribute: a kernel of 32 registers that uses no shared, constant or local
 * memory. */
CUresult cuFuncGetAttribute(int *value, int attribute, const void *function)
{
    (void)function;
    switch (attribute) {
    case 0: *value = 1024; break; /* MAX_THREADS_PER_BLOCK */
    case 4: *value = 32; break;   /* NUM_REGS */
    case 5:                       /* PTX_VERSION */
    case 6: *value = model()->capability; break;
    case 8: return most_shared(value); /* MAX_DYNAMIC_SHARED_SIZE_BYTES */
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int *value, int attribute, const void *kernel, int device)
{
    (void)device;
    return cuFuncGetAttribute(value, attribute, kernel);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                     size_t shared_bytes)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared_bytes, 0);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int block_size,
                                                              size_t shared_bytes, unsigned flags)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared_bytes, flags);
}

/* One cluster per multiprocessor. */
CUresult cuOccupancyMaxActiveClusters(int *clusters, const void *function, const void *config)
{
    (void)function, (void)config;
    *clusters = model()->multiprocessors;
    return CUDA_SUCCESS;
}

SUCCEED(cuModuleUnload)
SUCCEED(cuLibraryUnload)
WORK(cuLaunchKernel)
WORK(cuLaunchKernelEx)
WORK(cuLaunchCooperativeKernel)
SUCCEED(cuFuncSetAttribute)
SUCCEED(cuFuncSetCacheConfig)
SUCCEED(cuKernelSetAttribute)
/* These fill descriptors that only kernels read. */
SUCCEED(cuTensorMapEncodeTiled)
SUCCEED(cuTensorMapEncodeIm2col)

/* CUlimit, with CUDA's documented defaults: stack of a thread, printf buffer, malloc heap. */
static size_t limits[] = {1024, 1 << 20, 8 << 20};

CUresult cuCtxGetLimit(size_t *value, unsigned limit)
{
    if (limit >= sizeof limits / sizeof *limits)
        return unsupported("cuCtxGetLimit", CUDA_ERROR_NOT_SUPPORTED);
    *value = limits[limit];
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(unsigned limit, size_t value)
{
    if (limit >= sizeof limits / sizeof *limits)
        return unsupported("cuCtxSetLimit", CUDA_ERROR_NOT_SUPPORTED);
    limits[limit] = value;
    return CUDA_SUCCESS;
}
