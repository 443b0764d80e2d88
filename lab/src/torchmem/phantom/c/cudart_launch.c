/* Stands in for libcudart: registers, finds and launches kernels, which compute nothing. */
#include "cudart.h"

#include <string.h>

WORK(cudaLaunchKernelExC)
WORK(cudaLaunchCooperativeKernel)
SUCCEED(__cudaPushCallConfiguration)
SUCCEED(__cudaRegisterFatBinaryEnd)
SUCCEED(__cudaUnregisterFatBinary)
SUCCEED(__cudaRegisterVar)
SUCCEED(cudaFuncSetAttribute)
SUCCEED(cudaFuncSetCacheConfig)
SUCCEED(cudaKernelSetAttributeForDevice)
SUCCEED(cudaLibraryUnload)

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments)
{
    (void)grid, (void)block;
    forget_host_writes();
    kernel_launched(function, arguments);
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments)
{
    return cudaLaunchKernel(function, grid, block, arguments);
}

/* Functions with two leading underscores are called by code that nvcc adds to every CUDA program. */
void **__cudaRegisterFatBinary(void *binary)
{
    static void *module;
    (void)binary;
    return &module;
}

void __cudaRegisterFunction(void **module, const void *function, char *host_name, const char *name)
{
    (void)module, (void)host_name;
    register_kernel(function, name);
}

char __cudaInitModule(void **module)
{
    (void)module;
    return 1;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream)
{
    *grid = *block = (dim3){1, 1, 1};
    *shared_bytes = 0;
    *(void **)stream = NULL;
    return cudaSuccess;
}

/* The remaining arguments are options, which are ignored. */
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code)
{
    *library = (cudaLibrary_t)code;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    (void)library;
    *kernel = (cudaKernel_t)name;
    return cudaSuccess;
}

static int attribute_of_gpu(int attribute)
{
    int value = 0;
    device_attribute(attribute, gpu_of(current_device()), &value);
    return value;
}

/* The architecture whose code runs on the GPU: the closest one not above it that PyTorch's wheels
 * are built for (TORCH_CUDA_ARCH_LIST, 2.4 to 2.15). CUB looks it up and rejects one that it was
 * not compiled for. */
static int architecture(void)
{
    static const int built_for[] = {120, 100, 90, 86, 80, 75, 70, 60, 50};
    for (size_t row = 0; row < sizeof built_for / sizeof *built_for; row++)
        if (built_for[row] <= model()->capability)
            return built_for[row];
    return model()->capability;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->maxDynamicSharedSizeBytes = attribute_of_gpu(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = architecture();
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                   int block_size, size_t shared_bytes,
                                                                   unsigned flags)
{
    (void)function, (void)shared_bytes, (void)flags;
    int threads = attribute_of_gpu(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    *blocks = block_size > 0 && block_size < threads ? threads / block_size : 1;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                          size_t shared_bytes)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared_bytes, 0);
}

/* All device variables have the same address, because nothing is ever read from it. */
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
    static void *variables;
    (void)symbol;
    if (!variables) {
        uintptr_t start = (uintptr_t)(variables = reserve_addresses(PAGE_BYTES));
        add_range((struct range){.start = start, .end = start + PAGE_BYTES, .kind = DEVICE_MAPPED});
    }
    *address = variables;
    return cudaSuccess;
}
