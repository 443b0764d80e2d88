/* Stands in for libcufft: plans know the size of their work area, transforms compute nothing. */
#include "cudart.h"

/* The rules below were found by measuring cuFFT of CUDA 13.0 on an H200 (experiments/phantom_truth):
 * 1 to 3 dimensions, 64 to 4 million numbers, single and double precision. One kernel transforms up
 * to 16384 complex numbers without a work area. A longer side needs a copy of the data. A large
 * prime factor needs about four: the side becomes part of one of twice the length (Bluestein). */
enum { ONE_KERNEL = 16384, ONE_KERNEL_REAL_DOUBLE = 4096, SMALL_PRIME = 127, LARGE_PRIME = 4096 };
static const double BLUESTEIN_COPIES = 4.05;

static long long largest_prime(long long side)
{
    long long largest = 1;
    for (long long factor = 2; factor * factor <= side; factor++)
        for (; side % factor == 0; side /= factor)
            largest = factor;
    return side > largest ? side : largest;
}

static double complex_copies(long long side)
{
    bool is_short = side <= ONE_KERNEL;
    if (largest_prime(side) > (is_short ? LARGE_PRIME : SMALL_PRIME))
        return BLUESTEIN_COPIES;
    return is_short ? 0 : 1;
}

/* Copies of the complex data for one real side. Real numbers of an even side count as half as many
 * complex ones; two transforms of an odd side as one of complex numbers. */
static double real_copies(long long side, long long batch, bool is_double)
{
    double copies = complex_copies(side);
    long long longest = is_double ? ONE_KERNEL_REAL_DOUBLE : ONE_KERNEL;
    if (side <= longest && largest_prime(side) <= SMALL_PRIME)
        return 0;
    if (side % 2 == 0)
        return copies > 1 ? (1 + copies) / 2 : 0.5;
    return (double)((batch + 1) / 2) / (double)batch * (1 + (copies > 1 ? copies : 1));
}

/* Bytes of one complex number, by the cudaDataType of its parts: CUDA_R_64F and CUDA_C_64F;
 * CUDA_{R,C}_{16F,16BF}; all others are single precision. */
static size_t complex_bytes(int type) { return type == 1 || type == 5 ? 16 : type == 0 || type == 4 ? 8 : 4; }

/* CUDA_R_32F, CUDA_R_64F, CUDA_R_16F and CUDA_R_16BF of cudaDataType. */
static bool is_of_real_numbers(int type) { return type == 0 || type == 1 || type == 2 || type == 14; }

int cufftXtMakePlanMany(int plan, int rank, long long *sides, long long *in_embed, long long in_stride,
                        long long in_distance, int in_type, long long *out_embed, long long out_stride,
                        long long out_distance, int out_type, long long batch, size_t *work_bytes, int type)
{
    (void)plan, (void)in_embed, (void)in_stride, (void)in_distance;
    (void)out_embed, (void)out_stride, (void)out_distance;
    bool is_real = is_of_real_numbers(in_type) || is_of_real_numbers(out_type);
    double numbers = (double)batch, copies = 0;
    estimated("cuFFT");
    for (int side = 0; side < rank; side++) {
        numbers *= (double)sides[side];
        long long others = batch;
        for (int other = 0; other < side; other++)
            others *= sides[other];
        bool halves = is_real && side == rank - 1;
        double needed = halves ? real_copies(sides[side], others, complex_bytes(type) == 16)
                               : complex_copies(sides[side]);
        copies = needed > copies ? needed : copies;
    }
    *work_bytes = (size_t)(numbers * copies) * complex_bytes(type);
    return 0;
}

int cufftCreate(int *plan)
{
    static int plans;
    *plan = __atomic_add_fetch(&plans, 1, __ATOMIC_RELAXED);
    return 0;
}


SUCCEED(cufftDestroy)
SUCCEED(cufftSetAutoAllocation)
SUCCEED(cufftSetStream)
SUCCEED(cufftSetWorkArea)
WORK(cufftXtExec)
