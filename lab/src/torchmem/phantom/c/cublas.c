/* Stands in for libcublas: handles are real, nothing is computed. A number that cuBLAS returns to
 * the host is that for vectors of zeros. To add a call, add it here: with WORK if it only works on
 * the GPU. */
#include "cudart.h"

#include <stdlib.h>
#include <string.h>

struct handle {
    int pointer_mode, math_mode;
};

int cublasCreate_v2(struct handle **handle)
{
    *handle = calloc(1, sizeof **handle);
    return 0;
}

int cublasDestroy_v2(struct handle *handle)
{
    free(handle);
    return 0;
}

int cublasGetMathMode(struct handle *handle, int *mode)
{
    *mode = handle->math_mode;
    return 0;
}

int cublasSetMathMode(struct handle *handle, int mode)
{
    handle->math_mode = mode;
    return 0;
}

int cublasGetPointerMode_v2(struct handle *handle, int *mode)
{
    *mode = handle->pointer_mode;
    return 0;
}

int cublasSetPointerMode_v2(struct handle *handle, int mode)
{
    handle->pointer_mode = mode;
    return 0;
}

SUCCEED(cublasSetStream_v2)
SUCCEED(cublasSetWorkspace_v2)
SUCCEED(cublasSetSmCountTarget)

#define WORK_REAL(name) WORK(cublasS##name) WORK(cublasD##name)
#define WORK_COMPLEX(name) WORK(cublasC##name) WORK(cublasZ##name)
#define WORK_ALL(name) WORK_REAL(name) WORK_COMPLEX(name)

/* Products and solvers. */
WORK(cublasGemmEx)
WORK(cublasGemmStridedBatchedEx)
WORK(cublasSgemmEx)
WORK_ALL(gemm_v2)
WORK_ALL(gemmBatched)
WORK_ALL(gemmStridedBatched)
WORK_ALL(gemv_v2)
WORK_ALL(trsm_v2)
WORK_ALL(trsmBatched)

/* The rest of BLAS, which MAGMA calls from inside libtorch_cuda_linalg. */
WORK_ALL(axpy_v2)
WORK_ALL(copy_v2)
WORK_ALL(rot_v2)
WORK_ALL(rotg_v2)
WORK_ALL(scal_v2)
WORK_ALL(swap_v2)
WORK_ALL(symm_v2)
WORK_ALL(symv_v2)
WORK_ALL(syr_v2)
WORK_ALL(syr2_v2)
WORK_ALL(syr2k_v2)
WORK_ALL(syrk_v2)
WORK_ALL(trmm_v2)
WORK_ALL(trmv_v2)
WORK_ALL(trsv_v2)
WORK_REAL(ger_v2)
WORK_REAL(rotm_v2)
WORK_REAL(rotmg_v2)
WORK_COMPLEX(gerc_v2)
WORK_COMPLEX(geru_v2)
WORK_COMPLEX(hemm_v2)
WORK_COMPLEX(hemv_v2)
WORK_COMPLEX(her_v2)
WORK_COMPLEX(her2_v2)
WORK_COMPLEX(her2k_v2)
WORK_COMPLEX(herk_v2)
WORK(cublasCsrot_v2)
WORK(cublasCsscal_v2)
WORK(cublasZdrot_v2)
WORK(cublasZdscal_v2)

/* Writes a result of one number, which is either on the host or on the GPU. */
static int result(void *to, size_t size, int first_byte)
{
    forget_writes();
    if (on_device(to))
        return 0;
    memset(to, 0, size);
    *(char *)to = (char)first_byte;
    return 0;
}

#define OF_ONE_VECTOR(name, size, value)                                      \
    int name(struct handle *handle, int n, const void *x, int step, void *to) \
    {                                                                         \
        (void)handle, (void)n, (void)x, (void)step;                           \
        return result(to, size, value);                                       \
    }
/* The index of the first element, which starts at 1. */
#define INDEX(name) OF_ONE_VECTOR(name, sizeof(int), n > 0)
#define OF_TWO_VECTORS(name, size)                                                                         \
    int name(struct handle *handle, int n, const void *x, int x_step, const void *y, int y_step, void *to) \
    {                                                                                                      \
        (void)handle, (void)n, (void)x, (void)x_step, (void)y, (void)y_step;                               \
        return result(to, size, 0);                                                                        \
    }

INDEX(cublasIsamax_v2)
INDEX(cublasIdamax_v2)
INDEX(cublasIcamax_v2)
INDEX(cublasIzamax_v2)
INDEX(cublasIsamin_v2)
INDEX(cublasIdamin_v2)
INDEX(cublasIcamin_v2)
INDEX(cublasIzamin_v2)
OF_ONE_VECTOR(cublasSasum_v2, 4, 0)
OF_ONE_VECTOR(cublasDasum_v2, 8, 0)
OF_ONE_VECTOR(cublasScasum_v2, 4, 0)
OF_ONE_VECTOR(cublasDzasum_v2, 8, 0)
OF_ONE_VECTOR(cublasSnrm2_v2, 4, 0)
OF_ONE_VECTOR(cublasDnrm2_v2, 8, 0)
OF_ONE_VECTOR(cublasScnrm2_v2, 4, 0)
OF_ONE_VECTOR(cublasDznrm2_v2, 8, 0)
OF_TWO_VECTORS(cublasSdot_v2, 4)
OF_TWO_VECTORS(cublasDdot_v2, 8)
OF_TWO_VECTORS(cublasCdotc_v2, 8)
OF_TWO_VECTORS(cublasCdotu_v2, 8)
OF_TWO_VECTORS(cublasZdotc_v2, 16)
OF_TWO_VECTORS(cublasZdotu_v2, 16)
/* The result is always on the GPU, because PyTorch sets the pointer mode first. */
WORK(cublasDotEx)

/* Batches of factorizations. `info` on the host is 0: no argument was wrong. */
#define FACTORS(T)                                                                                                   \
    WORK(cublas##T##getrfBatched)                                                                                    \
    WORK(cublas##T##getriBatched)                                                                                    \
    int cublas##T##geqrfBatched(struct handle *handle, int m, int n, void *a, int lda, void *tau, int *info)         \
    {                                                                                                                \
        (void)handle, (void)m, (void)n, (void)a, (void)lda, (void)tau;                                               \
        return result(info, sizeof *info, 0);                                                                        \
    }                                                                                                                \
    int cublas##T##getrsBatched(struct handle *handle, int trans, int n, int sides, void *a, int lda, void *pivots,  \
                                void *b, int ldb, int *info)                                                         \
    {                                                                                                                \
        (void)handle, (void)trans, (void)n, (void)sides, (void)a, (void)lda, (void)pivots, (void)b, (void)ldb;       \
        return result(info, sizeof *info, 0);                                                                        \
    }                                                                                                                \
    int cublas##T##gelsBatched(struct handle *handle, int trans, int m, int n, int sides, void *a, int lda, void *c, \
                               int ldc, int *info)                                                                   \
    {                                                                                                                \
        (void)handle, (void)trans, (void)m, (void)n, (void)sides, (void)a, (void)lda, (void)c, (void)ldc;            \
        return result(info, sizeof *info, 0);                                                                        \
    }

FACTORS(S)
FACTORS(D)
FACTORS(C)
FACTORS(Z)

/* Copies to the host are zero; `stride` is the host's leading dimension in bytes. */
static int to_host(int rows, int columns, int size, char *to, size_t stride)
{
    for (int column = 0; column < columns; column++)
        memset(to + (size_t)column * stride, 0, (size_t)rows * (size_t)size);
    return 0;
}

int cublasGetMatrixAsync(int rows, int columns, int size, const void *a, int lda, void *b, int ldb)
{
    (void)a, (void)lda;
    return to_host(rows, columns, size, b, (size_t)ldb * (size_t)size);
}

int cublasGetVectorAsync(int n, int size, const void *x, int x_step, void *y, int y_step)
{
    (void)x, (void)x_step;
    return to_host(1, n, size, y, (size_t)y_step * (size_t)size);
}

WORK(cublasSetMatrixAsync)
WORK(cublasSetVectorAsync)
