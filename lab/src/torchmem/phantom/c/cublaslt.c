/* Stands in for libcublasLt: finds one algorithm for every product and computes nothing. */
#include "cudart.h"

#include <stdlib.h>

enum { CUBLASLT_VERSION_SHOWN = 130100 };

size_t cublasLtGetVersion(void) { return CUBLASLT_VERSION_SHOWN; }

/* cublasLtMatmulHeuristicResult_t of cublasLt.h. It requests no workspace: PyTorch allocates one
 * of a fixed size. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace_size;
    int state;
    float waves_count;
    int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int requested, struct heuristic *results, int *count)
{
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *count = requested > 0;
    if (*count)
        results[0] = (struct heuristic){.waves_count = 1};
    return 0;
}

#define DESCRIPTOR(kind)                          \
    int cublasLt##kind##Create(void **descriptor) \
    {                                             \
        *descriptor = malloc(1);                  \
        return 0;                                 \
    }                                             \
    int cublasLt##kind##Destroy(void *descriptor) \
    {                                             \
        free(descriptor);                         \
        return 0;                                 \
    }

DESCRIPTOR(MatmulDesc)
DESCRIPTOR(MatmulPreference)
DESCRIPTOR(MatrixLayout)

WORK(cublasLtMatmul)
SUCCEED(cublasLtMatmulDescSetAttribute)
SUCCEED(cublasLtMatmulPreferenceSetAttribute)
SUCCEED(cublasLtMatrixLayoutSetAttribute)
