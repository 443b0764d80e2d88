/* Stands in for libcusparse: a sparse matrix knows its size, products are never computed.
 *
 * The number of entries of a computed sparse matrix depends on values, so it has none. NVIDIA
 * documents no buffer sizes. Those of products with dense matrices and vectors are cuSPARSE's of
 * CUDA 13.0 on an H200 (experiments/phantom_truth). The other estimates are an index of 4 bytes per
 * row and per entry for solvers and sparse results, and per row for sums; for sorting, two indices
 * and a permutation per entry; nothing for SDDMM. */
#include "cudart.h"

#include <stdlib.h>

enum { INDEX_BYTES = 4 };

struct matrix {
    int64_t rows, cols, entries;
};

static size_t part_of_entries(const struct matrix *matrix, int divisor, int more)
{
    estimated("cuSPARSE");
    return (size_t)(matrix->entries / divisor + more);
}

static size_t per_entry(const struct matrix *matrix)
{
    estimated("cuSPARSE");
    return (size_t)(matrix->rows + matrix->entries) * INDEX_BYTES;
}

static int create(struct matrix **matrix, int64_t rows, int64_t cols, int64_t entries)
{
    *matrix = malloc(sizeof **matrix);
    **matrix = (struct matrix){.rows = rows, .cols = cols, .entries = entries};
    return 0;
}

int cusparseCreateCoo(struct matrix **matrix, int64_t rows, int64_t cols, int64_t entries)
{
    return create(matrix, rows, cols, entries);
}

int cusparseCreateCsr(struct matrix **matrix, int64_t rows, int64_t cols, int64_t entries)
{
    return create(matrix, rows, cols, entries);
}

int cusparseSpMatGetSize(const struct matrix *matrix, int64_t *rows, int64_t *cols, int64_t *entries)
{
    *rows = matrix->rows;
    *cols = matrix->cols;
    *entries = matrix->entries;
    return 0;
}

int cusparseSpMV_bufferSize(void *handle, int a_op, void *alpha, const struct matrix *a, void *x, void *beta, void *y,
                            int type, int algorithm, size_t *size)
{
    (void)handle, (void)a_op, (void)alpha, (void)x, (void)beta, (void)y, (void)type, (void)algorithm;
    *size = part_of_entries(a, 384, 20);
    return 0;
}

int cusparseSpMM_bufferSize(void *handle, int a_op, int b_op, void *alpha, const struct matrix *a, void *b, void *beta,
                            void *c, int type, int algorithm, size_t *size)
{
    (void)handle, (void)a_op, (void)b_op, (void)alpha, (void)b, (void)beta, (void)c, (void)type, (void)algorithm;
    *size = part_of_entries(a, 3, 10);
    return 0;
}

/* These need no buffer according to the documentation. */
int cusparseSDDMM_bufferSize(void *handle, int a_op, int b_op, void *alpha, void *a, void *b, void *beta, void *c,
                             int type, int algorithm, size_t *size)
{
    (void)handle, (void)a_op, (void)b_op, (void)alpha, (void)a, (void)b, (void)beta, (void)c, (void)type;
    (void)algorithm;
    *size = 0;
    return 0;
}

int cusparseSpSV_bufferSize(void *handle, int a_op, void *alpha, const struct matrix *a, void *x, void *y, int type,
                            int algorithm, void *solver, size_t *size)
{
    (void)handle, (void)a_op, (void)alpha, (void)x, (void)y, (void)type, (void)algorithm, (void)solver;
    *size = per_entry(a);
    return 0;
}

int cusparseSpSM_bufferSize(void *handle, int a_op, int b_op, void *alpha, const struct matrix *a, void *b, void *c,
                            int type, int algorithm, void *solver, size_t *size)
{
    (void)handle, (void)a_op, (void)b_op, (void)alpha, (void)b, (void)c, (void)type, (void)algorithm, (void)solver;
    *size = per_entry(a);
    return 0;
}

/* Each is called twice: for the size, without a buffer, and for the work. */
#define PRODUCT_STEP(name)                                                                                   \
    int name(void *handle, int a_op, int b_op, void *alpha, const struct matrix *a, const struct matrix *b,  \
             void *beta, void *c, int type, int algorithm, void *product, size_t *size, void *buffer)        \
    {                                                                                                        \
        (void)handle, (void)a_op, (void)b_op, (void)alpha, (void)beta, (void)c, (void)type, (void)algorithm; \
        (void)product;                                                                                       \
        if (!buffer)                                                                                         \
            *size = per_entry(a) + per_entry(b);                                                             \
        return 0;                                                                                            \
    }

PRODUCT_STEP(cusparseSpGEMM_workEstimation)
PRODUCT_STEP(cusparseSpGEMM_compute)

static int sort_size(size_t *size, int entries)
{
    *size = (size_t)entries * 3 * INDEX_BYTES;
    return 0;
}

int cusparseXcoosort_bufferSizeExt(void *handle, int m, int n, int entries, void *rows, void *cols, size_t *size)
{
    (void)handle, (void)m, (void)n, (void)rows, (void)cols;
    return sort_size(size, entries);
}

int cusparseXcsrsort_bufferSizeExt(void *handle, int m, int n, int entries, void *rows, void *cols, size_t *size)
{
    (void)handle, (void)m, (void)n, (void)rows, (void)cols;
    return sort_size(size, entries);
}

/* The sum of two sparse matrices: two steps, with a workspace. */
#define SUM(T)                                                                                                     \
    int cusparse##T##csrgeam2_bufferSizeExt(void *handle, int m, int n, void *alpha, void *a, int a_entries,       \
                                            void *a_values, void *a_rows, void *a_cols, void *beta, void *b,       \
                                            int b_entries, void *b_values, void *b_rows, void *b_cols, void *c,    \
                                            void *c_values, void *c_rows, void *c_cols, size_t *size)              \
    {                                                                                                              \
        (void)handle, (void)n, (void)alpha, (void)a, (void)a_entries, (void)a_values, (void)a_rows, (void)a_cols;  \
        (void)beta, (void)b, (void)b_entries, (void)b_values, (void)b_rows, (void)b_cols, (void)c, (void)c_values; \
        (void)c_rows, (void)c_cols;                                                                                \
        *size = (size_t)m * INDEX_BYTES;                                                                           \
        return 0;                                                                                                  \
    }                                                                                                              \
    WORK(cusparse##T##csrgeam2)

SUM(S)
SUM(D)
SUM(C)
SUM(Z)

int cusparseXcsrgeam2Nnz(void *handle, int m, int n, void *a, int a_entries, void *a_rows, void *a_cols, void *b,
                         int b_entries, void *b_rows, void *b_cols, void *c, void *c_rows, int *entries)
{
    (void)handle, (void)m, (void)n, (void)a, (void)a_entries, (void)a_rows, (void)a_cols, (void)b, (void)b_entries;
    (void)b_rows, (void)b_cols, (void)c, (void)c_rows;
    if (!on_device(entries))
        *entries = 0;
    return 0;
}

const char *cusparseGetErrorString(int status) { return status ? "not supported by the phantom GPU" : "success"; }

HANDLE(cusparseCreate, cusparseDestroy)
HANDLE(cusparseCreateDnMat, cusparseDestroyDnMat)
HANDLE(cusparseCreateDnVec, cusparseDestroyDnVec)
HANDLE(cusparseCreateMatDescr, cusparseDestroyMatDescr)
HANDLE(cusparseSpGEMM_createDescr, cusparseSpGEMM_destroyDescr)
HANDLE(cusparseSpSM_createDescr, cusparseSpSM_destroyDescr)
HANDLE(cusparseSpSV_createDescr, cusparseSpSV_destroyDescr)

int cusparseDestroySpMat(void *matrix)
{
    free(matrix);
    return 0;
}

#define WORK_ALL(name) \
    WORK(cusparseS##name) WORK(cusparseD##name) WORK(cusparseC##name) WORK(cusparseZ##name)

WORK(cusparseCreateIdentityPermutation)
SUCCEED(cusparseCsrSetPointers)
SUCCEED(cusparseCsrSetStridedBatch)
SUCCEED(cusparseDnMatSetStridedBatch)
WORK(cusparseSDDMM)
WORK(cusparseSDDMM_preprocess)
SUCCEED(cusparseSetMatDiagType)
SUCCEED(cusparseSetMatFillMode)
SUCCEED(cusparseSetMatIndexBase)
SUCCEED(cusparseSetMatType)
SUCCEED(cusparseSetPointerMode)
SUCCEED(cusparseSetStream)
WORK(cusparseSpGEMM_copy)
WORK(cusparseSpMM)
WORK(cusparseSpMV)
SUCCEED(cusparseSpMatSetAttribute)
WORK(cusparseSpSM_analysis)
WORK(cusparseSpSM_solve)
WORK(cusparseSpSV_analysis)
WORK(cusparseSpSV_solve)
WORK(cusparseXcoo2csr)
WORK(cusparseXcoosortByRow)
WORK(cusparseXcsrsort)
WORK_ALL(bsrmm)
WORK_ALL(bsrmv)
