/* Stands in for libcusolver: nothing is factored, and every devInfo stays zero, which means
 * success.
 *
 * NVIDIA documents no workspace sizes. These formulas, in elements, were fitted to cuSOLVER of CUDA
 * 13.0 on an H200, for 64 to 2048 columns; most are within 1%. They are too low for gesvd of small
 * tall matrices (to a seventh) and for syevd of fewer than 1000 columns in double precision, and
 * twice too high for gesvda in double precision. What was not measured is LAPACK's workspace for the
 * routine of the same name (LAPACK Users' Guide, "optimal LWORK") with blocks of 32 columns. */
#include "cudart.h"

enum { BLOCK = 32 };

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t panel(int64_t rows) { return max(rows, 1) * BLOCK; }
static int64_t lu(int64_t n) { return 4 * n + 64; }
static int64_t cholesky(int64_t n) { return n * n / 1024 + 32; }
static int64_t qr(int64_t n) { return (512 << 10) + 1024 * max(n, 256); }
static int64_t q_of_qr(int64_t m, int64_t n) { return 128 * m + 256 * n + 16640; }
static int64_t times_q(int64_t m, int64_t k) { return 2 * m * k + 256 * m + 74016; }
static int64_t symmetric_indefinite(int64_t n) { return max(64 * n + 64, 24608); }
static int64_t general_eigen(int64_t n) { return n * n / 8 + 400 * n + 12000; }
static int64_t symmetric_eigen(int64_t n) { return 4 * n * n + 127 * n + 33000; }
static int64_t symmetric_jacobi(int64_t n) { return n * n + 36 * n + 600; }

static int64_t svd(int64_t m, int64_t n)
{
    int64_t square = 3 * n * n + 260 * n + 65792;
    return m > n ? square + 3 * m * n : square;
}

static int64_t svd_jacobi(int64_t m, int64_t n)
{
    int64_t k = min(m, n), square = m * n + k * k + 70 * k + 400;
    return m == n ? square : max(square + k * k, qr(k));
}

static int64_t svd_approximate(int64_t m, int64_t n) { return 12 * m * n + 300 * n + 250000; }

static int64_t jacobi(int64_t m, int64_t n, int64_t batch) { return batch * (m * n + min(m, n) * min(m, n)); }
static int64_t lapack_symmetric_eigen(int vectors, int64_t n) { return vectors ? 1 + 6 * n + 2 * n * n : 2 * n + 1; }

static int elements(int *count, int64_t length)
{
    estimated("cuSOLVER");
    *count = (int)min(length, INT32_MAX);
    return 0;
}

/* Bytes of one element, by cudaDataType: CUDA_R_32F, CUDA_R_64F, CUDA_C_32F, CUDA_C_64F. */
static int bytes(size_t *device, size_t *host, int64_t length, int type)
{
    static const int sizes[] = {4, 8, 0, 0, 8, 16};
    estimated("cuSOLVER");
    *device = (size_t)length * (size_t)(type >= 0 && type < 6 ? sizes[type] : 16);
    *host = 0;
    return 0;
}

HANDLE(cusolverDnCreate, cusolverDnDestroy)
HANDLE(cusolverDnCreateParams, cusolverDnDestroyParams)
HANDLE(cusolverDnCreateGesvdjInfo, cusolverDnDestroyGesvdjInfo)
HANDLE(cusolverDnCreateSyevjInfo, cusolverDnDestroySyevjInfo)

/* The same functions for one element type; complex ones have other names (un-, he- for or-, sy-). */
#define SIZES(T, or, sy)                                                                                         \
    int cusolverDn##T##geqrf_bufferSize(void *handle, int m, int n, void *a, int lda, int *count)                \
    {                                                                                                            \
        (void)handle, (void)m, (void)a, (void)lda;                                                               \
        return elements(count, qr(n));                                                                           \
    }                                                                                                            \
    int cusolverDn##T##getrf_bufferSize(void *handle, int m, int n, void *a, int lda, int *count)                \
    {                                                                                                            \
        (void)handle, (void)n, (void)a, (void)lda;                                                               \
        return elements(count, lu(m));                                                                           \
    }                                                                                                            \
    int cusolverDn##T##potrf_bufferSize(void *handle, int uplo, int n, void *a, int lda, int *count)             \
    {                                                                                                            \
        (void)handle, (void)uplo, (void)a, (void)lda;                                                            \
        return elements(count, cholesky(n));                                                                     \
    }                                                                                                            \
    int cusolverDn##T##sytrf_bufferSize(void *handle, int n, void *a, int lda, int *count)                       \
    {                                                                                                            \
        (void)handle, (void)a, (void)lda;                                                                        \
        return elements(count, symmetric_indefinite(n));                                                         \
    }                                                                                                            \
    int cusolverDn##T##or##gqr_bufferSize(void *handle, int m, int n, int k, void *a, int lda, void *tau,        \
                                          int *count)                                                            \
    {                                                                                                            \
        (void)handle, (void)k, (void)a, (void)lda, (void)tau;                                                    \
        return elements(count, q_of_qr(m, n));                                                                   \
    }                                                                                                            \
    int cusolverDn##T##or##mqr_bufferSize(void *handle, int right, int trans, int m, int n, int k, void *a,      \
                                          int lda, void *tau, void *c, int ldc, int *count)                      \
    {                                                                                                            \
        (void)handle, (void)trans, (void)a, (void)lda, (void)tau, (void)c, (void)ldc;                            \
        return elements(count, times_q(right ? n : m, k));                                                       \
    }                                                                                                            \
    int cusolverDn##T##gesvd_bufferSize(void *handle, int m, int n, int *count)                                  \
    {                                                                                                            \
        (void)handle;                                                                                            \
        return elements(count, svd(m, n));                                                                       \
    }                                                                                                            \
    int cusolverDn##T##gesvdj_bufferSize(void *handle, int vectors, int thin, int m, int n, void *a, int lda,    \
                                         void *s, void *u, int ldu, void *v, int ldv, int *count)                \
    {                                                                                                            \
        (void)handle, (void)vectors, (void)thin, (void)a, (void)lda, (void)s, (void)u, (void)ldu, (void)v;       \
        (void)ldv;                                                                                               \
        return elements(count, svd_jacobi(m, n));                                                                \
    }                                                                                                            \
    int cusolverDn##T##gesvdjBatched_bufferSize(void *handle, int vectors, int m, int n, void *a, int lda,       \
                                                void *s, void *u, int ldu, void *v, int ldv, int *count,         \
                                                void *parameters, int batch)                                     \
    {                                                                                                            \
        (void)handle, (void)vectors, (void)a, (void)lda, (void)s, (void)u, (void)ldu, (void)v, (void)ldv;        \
        (void)parameters;                                                                                        \
        return elements(count, jacobi(m, n, batch));                                                             \
    }                                                                                                            \
    int cusolverDn##T##gesvdaStridedBatched_bufferSize(                                                          \
        void *handle, int vectors, int rank, int m, int n, void *a, int lda, long long stride_a, void *s,        \
        long long stride_s, void *u, int ldu, long long stride_u, void *v, int ldv, long long stride_v,          \
        int *count, int batch)                                                                                   \
    {                                                                                                            \
        (void)handle, (void)vectors, (void)rank, (void)a, (void)lda, (void)stride_a, (void)s, (void)stride_s;    \
        (void)u, (void)ldu, (void)stride_u, (void)v, (void)ldv, (void)stride_v;                                  \
        return elements(count, batch * svd_approximate(m, n));                                                   \
    }                                                                                                            \
    int cusolverDn##T##sy##evd_bufferSize(void *handle, int vectors, int uplo, int n, void *a, int lda, void *w, \
                                          int *count)                                                            \
    {                                                                                                            \
        (void)handle, (void)vectors, (void)uplo, (void)a, (void)lda, (void)w;                                    \
        return elements(count, symmetric_eigen(n));                                                              \
    }                                                                                                            \
    int cusolverDn##T##sy##evj_bufferSize(void *handle, int vectors, int uplo, int n, void *a, int lda, void *w, \
                                          int *count, void *parameters)                                          \
    {                                                                                                            \
        (void)handle, (void)vectors, (void)uplo, (void)a, (void)lda, (void)w, (void)parameters;                  \
        return elements(count, symmetric_jacobi(n));                                                             \
    }                                                                                                            \
    int cusolverDn##T##sy##evjBatched_bufferSize(void *handle, int vectors, int uplo, int n, void *a, int lda,   \
                                                 void *w, int *count, void *parameters, int batch)               \
    {                                                                                                            \
        (void)handle, (void)vectors, (void)uplo, (void)a, (void)lda, (void)w, (void)parameters;                  \
        return elements(count, jacobi(n, n, batch));                                                             \
    }

SIZES(S, or, sy)
SIZES(D, or, sy)
SIZES(C, un, he)
SIZES(Z, un, he)

int cusolverDnXgeqrf_bufferSize(void *handle, void *parameters, int64_t m, int64_t n, int type, void *a, int64_t lda,
                                int tau_type, void *tau, int compute_type, size_t *device, size_t *host)
{
    (void)handle, (void)parameters, (void)m, (void)a, (void)lda, (void)tau_type, (void)tau, (void)compute_type;
    return bytes(device, host, qr(n), type);
}

int cusolverDnXpotrf_bufferSize(void *handle, void *parameters, int uplo, int64_t n, int type, void *a, int64_t lda,
                                int compute_type, size_t *device, size_t *host)
{
    (void)handle, (void)parameters, (void)uplo, (void)a, (void)lda, (void)compute_type;
    return bytes(device, host, cholesky(n), type);
}

int cusolverDnXsyevd_bufferSize(void *handle, void *parameters, int vectors, int uplo, int64_t n, int type, void *a,
                                int64_t lda, int w_type, void *w, int compute_type, size_t *device, size_t *host)
{
    (void)handle, (void)parameters, (void)vectors, (void)uplo, (void)a, (void)lda, (void)w_type, (void)w;
    (void)compute_type;
    return bytes(device, host, symmetric_eigen(n), type);
}

int cusolverDnXsyevBatched_bufferSize(void *handle, void *parameters, int vectors, int uplo, int64_t n, int type,
                                      void *a, int64_t lda, int w_type, void *w, int compute_type, size_t *device,
                                      size_t *host, int64_t batch)
{
    (void)handle, (void)parameters, (void)uplo, (void)a, (void)lda, (void)w_type, (void)w, (void)compute_type;
    return bytes(device, host, batch * lapack_symmetric_eigen(vectors, n), type);
}

int cusolverDnXgeev_bufferSize(void *handle, void *parameters, int left, int right, int64_t n, int type, void *a,
                               int64_t lda, int w_type, void *w, int left_type, void *vl, int64_t ldvl,
                               int right_type, void *vr, int64_t ldvr, int compute_type, size_t *device, size_t *host)
{
    (void)handle, (void)parameters, (void)left, (void)right, (void)a, (void)lda, (void)w_type, (void)w;
    (void)left_type, (void)vl, (void)ldvl, (void)right_type, (void)vr, (void)ldvr, (void)compute_type;
    return bytes(device, host, general_eigen(n), type);
}

int cusolverDnXsytrs_bufferSize(void *handle, int uplo, int64_t n, int64_t right_sides, int type, void *a, int64_t lda,
                                int64_t *pivots, int b_type, void *b, int64_t ldb, size_t *device, size_t *host)
{
    (void)handle, (void)uplo, (void)n, (void)a, (void)lda, (void)pivots, (void)b_type, (void)b, (void)ldb;
    return bytes(device, host, panel(right_sides), type);
}

#define WORK_ONE(T, or, sy)                                                              \
    WORK(cusolverDn##T##geqrf) WORK(cusolverDn##T##getrf) WORK(cusolverDn##T##getrs)     \
    WORK(cusolverDn##T##potrf) WORK(cusolverDn##T##potrs) WORK(cusolverDn##T##sytrf)     \
    WORK(cusolverDn##T##potrfBatched) WORK(cusolverDn##T##potrsBatched)                  \
    WORK(cusolverDn##T##or##gqr) WORK(cusolverDn##T##or##mqr) WORK(cusolverDn##T##gesvd) \
    WORK(cusolverDn##T##gesvdj) WORK(cusolverDn##T##gesvdjBatched)                       \
    WORK(cusolverDn##T##gesvdaStridedBatched) WORK(cusolverDn##T##sy##evd)               \
    WORK(cusolverDn##T##sy##evj) WORK(cusolverDn##T##sy##evjBatched)

WORK_ONE(S, or, sy)
WORK_ONE(D, or, sy)
WORK_ONE(C, un, he)
WORK_ONE(Z, un, he)
SUCCEED(cusolverDnSetStream)
WORK(cusolverDnXgeev)
WORK(cusolverDnXgeqrf)
SUCCEED(cusolverDnXgesvdjSetMaxSweeps)
SUCCEED(cusolverDnXgesvdjSetSortEig)
SUCCEED(cusolverDnXgesvdjSetTolerance)
WORK(cusolverDnXpotrf)
WORK(cusolverDnXpotrs)
WORK(cusolverDnXsyevBatched)
WORK(cusolverDnXsyevd)
SUCCEED(cusolverDnXsyevjSetSortEig)
SUCCEED(cusolverDnXsyevjSetTolerance)
WORK(cusolverDnXsytrs)
