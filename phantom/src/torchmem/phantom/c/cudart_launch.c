/* Stands in for libcudart: kernels. They are registered, found and launched, and compute nothing. */
#include "cudart.h"

#include <string.h>

SUCCEED(cudaLaunchKernel)
SUCCEED(cudaLaunchKernelExC)
SUCCEED(__cudaLaunchKernel)
SUCCEED(__cudaPushCallConfiguration)
SUCCEED(__cudaRegisterFatBinaryEnd)
SUCCEED(__cudaUnregisterFatBinary)
SUCCEED(__cudaRegisterFunction)
SUCCEED(__cudaRegisterVar)
SUCCEED(cudaFuncSetAttribute)
SUCCEED(cudaKernelSetAttributeForDevice)
SUCCEED(cudaLibraryUnload)

/* The names nvcc puts into every CUDA program; no header for C declares them. */
void **__cudaRegisterFatBinary(void *binary);
char __cudaInitModule(void **module);
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream);

void **__cudaRegisterFatBinary(void *binary)
{
    static void *module;
    (void)binary;
    return &module;
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

#if CUDART_VERSION >= 12080
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options,
                                void **values, unsigned option_count, enum cudaLibraryOption *library_options,
                                void **library_values, unsigned library_option_count)
{
    (void)options, (void)values, (void)option_count;
    (void)library_options, (void)library_values, (void)library_option_count;
    *library = (cudaLibrary_t)code;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    (void)library;
    *kernel = (cudaKernel_t)name;
    return cudaSuccess;
}
#endif

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->maxDynamicSharedSizeBytes = 227 << 10;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                   int block_size, size_t shared_bytes,
                                                                   unsigned flags)
{
    (void)function, (void)shared_bytes, (void)flags;
    *blocks = block_size > 0 && block_size < 2048 ? 2048 / block_size : 1;
    return cudaSuccess;
}

/* Every device variable lies at the same address: nothing is ever read from it. */
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
