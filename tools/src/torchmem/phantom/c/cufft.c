/* Stands in for libcufft: plans know the size of their work area, transforms compute nothing. */
#include "cudart.h"

/* An estimate, not compared with the library: one copy of the transformed data, in complex
 * numbers; eight copies if a side has a prime factor other than 2, 3, 5 and 7, because cuFFT has
 * kernels for these and transforms other sizes as part of a longer one. */
static int copies(long long side)
{
    for (int factor = 2; factor <= 7; factor++)
        while (side > 1 && side % factor == 0)
            side /= factor;
    return side > 1 ? 8 : 1;
}

/* Bytes of one complex number, by the cudaDataType of its parts: CUDA_R_64F and CUDA_C_64F;
 * CUDA_{R,C}_{16F,16BF}; all others are single precision. */
static size_t complex_bytes(int type) { return type == 1 || type == 5 ? 16 : type == 0 || type == 4 ? 8 : 4; }

int cufftXtMakePlanMany(int plan, int rank, long long *sides, long long *in_embed, long long in_stride,
                        long long in_distance, int in_type, long long *out_embed, long long out_stride,
                        long long out_distance, int out_type, long long batch, size_t *work_bytes, int type)
{
    (void)plan, (void)in_embed, (void)in_stride, (void)in_distance, (void)in_type;
    (void)out_embed, (void)out_stride, (void)out_distance, (void)out_type;
    size_t elements = (size_t)batch, largest = 1;
    estimated("cuFFT");
    for (int side = 0; side < rank; side++) {
        size_t needed = (size_t)copies(sides[side]);
        elements *= (size_t)sides[side];
        largest = needed > largest ? needed : largest;
    }
    *work_bytes = elements * largest * complex_bytes(type);
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
