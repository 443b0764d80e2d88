/* Calls the phantom GPU lacks: each says its name on stderr and returns its library's "not supported", so
 * that the program ends with a traceback that shows where, never with a wrong number. */
#include "phantom.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

int unsupported(const char *call, int code)
{
    fprintf(stderr,
            "phantom: the phantom GPU has no %s: do without it here, or use a real GPU (phantom/README.md)\n",
            call);
    return code;
}

void stop(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fputs("phantom: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    _Exit(2);
}

#define LACKING(name, code) \
    int name(void);         \
    int name(void) { return unsupported(#name, code); }

/* libcudart: cudaErrorNotSupported */
LACKING(cudaDeviceEnablePeerAccess, 801)
LACKING(cudaGraphAddNode, 801)
LACKING(cudaGraphConditionalHandleCreate, 801)
LACKING(cudaGraphDebugDotPrint, 801)
LACKING(cudaGraphNodeGetDependencies, 801)
LACKING(cudaStreamBeginCaptureToGraph, 801)
LACKING(cudaStreamUpdateCaptureDependencies, 801)
LACKING(cudaIpcCloseMemHandle, 801)
LACKING(cudaIpcGetEventHandle, 801)
LACKING(cudaIpcGetMemHandle, 801)
LACKING(cudaIpcOpenEventHandle, 801)
LACKING(cudaIpcOpenMemHandle, 801)

/* libcuda: CUDA_ERROR_NOT_SUPPORTED */
LACKING(cuCtxFromGreenCtx, 801)
LACKING(cuCtxPopCurrent_v2, 801)
LACKING(cuCtxPushCurrent_v2, 801)
LACKING(cuDevResourceGenerateDesc, 801)
LACKING(cuDevSmResourceSplitByCount, 801)
LACKING(cuDeviceGetDevResource, 801)
LACKING(cuFuncGetAttribute, 801)
LACKING(cuGreenCtxCreate, 801)
LACKING(cuGreenCtxDestroy, 801)
LACKING(cuGreenCtxStreamCreate, 801)
LACKING(cuLinkAddData_v2, 801)
LACKING(cuLinkComplete, 801)
LACKING(cuLinkCreate_v2, 801)
LACKING(cuMemExportToShareableHandle, 801)
LACKING(cuMemGetAllocationPropertiesFromHandle, 801)
LACKING(cuMemImportFromShareableHandle, 801)
LACKING(cuMemRetainAllocationHandle, 801)
LACKING(cuModuleLoad, 801)
LACKING(cuModuleLoadDataEx, 801)
LACKING(cuMulticastAddDevice, 801)
LACKING(cuMulticastBindMem, 801)
LACKING(cuMulticastCreate, 801)
LACKING(cuMulticastUnbind, 801)
LACKING(cuStreamWriteValue32_v2, 801)

/* The doors of the libraries it does not stand in for, each with that library's own code. */
LACKING(cudnnCreate, 3000)
LACKING(cusolverDnCreate, 9)
LACKING(cusparseCreate, 10)
LACKING(cusparseLtInit, 10)
LACKING(cufftCreate, 16)
LACKING(curandCreateGenerator, 204)
LACKING(ncclGetUniqueId, 5)
LACKING(ncclCommInitAll, 5)
LACKING(ncclCommInitRank, 5)
LACKING(ncclCommInitRankConfig, 5)
LACKING(ncclCommInitRankScalable, 5)

#define LACKING_ALL(name)      \
    LACKING(cublasS##name, 15) \
    LACKING(cublasD##name, 15) LACKING(cublasC##name, 15) LACKING(cublasZ##name, 15)

/* libcublas: CUBLAS_STATUS_NOT_SUPPORTED */
LACKING_ALL(gelsBatched)
LACKING_ALL(geqrfBatched)
LACKING_ALL(getrfBatched)
LACKING_ALL(getrsBatched)
