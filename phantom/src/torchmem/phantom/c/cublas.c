/* Stands in for libcublas and libcublasLt: handles are real, matrices are never multiplied. */
#include "phantom.h"

#include <stdlib.h>
#include <string.h>

enum { CUBLAS_STATUS_SUCCESS = 0, CUBLASLT_VERSION_SHOWN = 130100 };

struct handle {
    int pointer_mode, math_mode;
};

int cublasCreate_v2(struct handle **handle);
int cublasDestroy_v2(struct handle *handle);
int cublasGetMathMode(struct handle *handle, int *mode);
int cublasSetMathMode(struct handle *handle, int mode);
int cublasGetPointerMode_v2(struct handle *handle, int *mode);
int cublasSetPointerMode_v2(struct handle *handle, int mode);
size_t cublasLtGetVersion(void);

int cublasCreate_v2(struct handle **handle)
{
    *handle = calloc(1, sizeof **handle);
    return CUBLAS_STATUS_SUCCESS;
}

int cublasDestroy_v2(struct handle *handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

int cublasGetMathMode(struct handle *handle, int *mode)
{
    *mode = handle->math_mode;
    return CUBLAS_STATUS_SUCCESS;
}

int cublasSetMathMode(struct handle *handle, int mode)
{
    handle->math_mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}

int cublasGetPointerMode_v2(struct handle *handle, int *mode)
{
    *mode = handle->pointer_mode;
    return CUBLAS_STATUS_SUCCESS;
}

int cublasSetPointerMode_v2(struct handle *handle, int mode)
{
    handle->pointer_mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return CUBLASLT_VERSION_SHOWN; }

/* cublasLtMatmulHeuristicResult_t of cublasLt.h: one way to multiply, which needs no workspace. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace_size;
    int state;
    float waves_count;
    int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, struct heuristic *results, int *found);

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, struct heuristic *results, int *found)
{
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *found = wanted > 0;
    if (*found)
        results[0] = (struct heuristic){.waves_count = 1};
    return CUBLAS_STATUS_SUCCESS;
}

#define DESCRIPTOR(kind)                           \
    int cublasLt##kind##Create(void **descriptor); \
    int cublasLt##kind##Create(void **descriptor)  \
    {                                              \
        *descriptor = malloc(1);                   \
        return CUBLAS_STATUS_SUCCESS;              \
    }                                              \
    int cublasLt##kind##Destroy(void *descriptor); \
    int cublasLt##kind##Destroy(void *descriptor)  \
    {                                              \
        free(descriptor);                          \
        return CUBLAS_STATUS_SUCCESS;              \
    }

DESCRIPTOR(MatmulDesc)
DESCRIPTOR(MatmulPreference)
DESCRIPTOR(MatrixLayout)

/* Arguments are not looked at, which the calling conventions of C allow. */
#define COMPUTE(name) \
    int name(void);   \
    int name(void) { return CUBLAS_STATUS_SUCCESS; }
#define COMPUTE_REAL(name) COMPUTE(cublasS##name) COMPUTE(cublasD##name)
#define COMPUTE_COMPLEX(name) COMPUTE(cublasC##name) COMPUTE(cublasZ##name)
#define COMPUTE_ALL(name) COMPUTE_REAL(name) COMPUTE_COMPLEX(name)

COMPUTE(cublasSetStream_v2)
COMPUTE(cublasSetWorkspace_v2)
COMPUTE(cublasSetSmCountTarget)
COMPUTE(cublasLtMatmul)
COMPUTE(cublasLtMatmulDescSetAttribute)
COMPUTE(cublasLtMatmulPreferenceSetAttribute)
COMPUTE(cublasLtMatrixLayoutSetAttribute)
COMPUTE(cublasGemmEx)
COMPUTE(cublasGemmStridedBatchedEx)
COMPUTE(cublasSgemmEx)
COMPUTE(cublasDotEx)
COMPUTE_REAL(dot_v2)
COMPUTE_COMPLEX(dotc_v2)
COMPUTE_COMPLEX(dotu_v2)
COMPUTE_ALL(gemm_v2)
COMPUTE_ALL(gemv_v2)
COMPUTE_ALL(gemmStridedBatched)
COMPUTE_ALL(trsm_v2)
COMPUTE_ALL(trsmBatched)
