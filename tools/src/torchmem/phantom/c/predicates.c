/* The result of a yes-or-no question, which no kernel computes. Zero would mean "no" for every
 * `all()` and every isfinite check, so the result is that of a tensor of zeros instead: `all()`,
 * `isfinite` and "not" are true, and a comparison with a number compares zero with it. Everything
 * else is false.
 *
 * The question is recognized by the name of the PyTorch kernel that was launched last, as in the
 * binaries of 2.13 (aten/src/ATen/native/cuda: ReduceLogicKernel.cu, CompareKernels.cu,
 * BinaryMulKernel.cu, UnaryOpsKernel.cu). Kernels with other names are not recognized, and their
 * result is false. */
#include "cudart.h"

#include <pthread.h>
#include <string.h>

enum { ROOM = 4096, ALWAYS_TRUE = 'Y' };

/* `kind`: ALWAYS_TRUE, or the mangled C++ type of the compared numbers; 'H' for 16-bit floating
 * point. */
static struct {
    const void *function;
    char kind;
} predicates[ROOM];
static size_t known;
static __thread bool result;

static char kind_of(const char *name)
{
    static const char comparison[] = "21compare_scalar_kernelI";
    const char *found = strstr(name, comparison);
    if (found) {
        found += sizeof comparison - 1;
        return strncmp(found, "N3c10", 5) ? *found : strstr(found, "4HalfE") || strstr(found, "8BFloat16E") ? 'H' : 0;
    }
    bool is_not = strstr(name, "23logical_not_kernel_cuda") || strstr(name, "23bitwise_not_kernel_cuda");
    bool of_bools = strstr(name, "EUlbE_") != NULL;
    return strstr(name, "15and_kernel_cuda") || strstr(name, "MulFunctorIbE") || (is_not && of_bools) ? ALWAYS_TRUE : 0;
}

static size_t row_of(const void *function)
{
    size_t row = ((uintptr_t)function >> 4) % ROOM;
    while (predicates[row].function && predicates[row].function != function)
        row = (row + 1) % ROOM;
    return row;
}

void register_predicate(const void *function, const char *name)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    char kind = kind_of(name);
    if (!kind)
        return;
    pthread_mutex_lock(&lock);
    size_t row = row_of(function);
    if (known < ROOM / 2 && !predicates[row].function) {
        predicates[row].kind = kind;
        __atomic_store_n(&predicates[row].function, function, __ATOMIC_RELEASE);
        known++;
    }
    pthread_mutex_unlock(&lock);
}

#define SIGN(type)                        \
    {                                     \
        type value;                       \
        memcpy(&value, at, sizeof value); \
        return (value > 0) - (value < 0); \
    }

static int sign_of(char letter, const char *lambda)
{
    const char *at = lambda + (letter == 'd' || letter == 'l' ? 8 : 4);
    switch (letter) {
    case 'f': SIGN(float)
    case 'd': SIGN(double)
    case 'l': SIGN(int64_t)
    case 'i': SIGN(int32_t)
    case 's': SIGN(int16_t)
    case 'a': SIGN(int8_t)
    case 'h': return *at != 0;
    default: SIGN(int16_t) /* 16-bit floating point has its sign bit where integers have it */
    }
}

/* `lambda`: the comparison (OpType: >=, >, <=, <), then the number. */
static bool zero_compares(char letter, const char *lambda)
{
    int comparison, sign = sign_of(letter, lambda);
    memcpy(&comparison, lambda, sizeof comparison);
    switch (comparison) {
    case 0: return sign <= 0;
    case 1: return sign < 0;
    case 2: return sign >= 0;
    case 3: return sign > 0;
    default: return false;
    }
}

void predicate_launched(const void *function, void **arguments)
{
    size_t row = row_of(function);
    char kind = predicates[row].function ? predicates[row].kind : 0;
    result = kind == ALWAYS_TRUE || (kind && strchr("fdlisahH", kind) && zero_compares(kind, arguments[1]));
}

void forget_predicate(void) { result = false; }

/* A boolean is one byte. */
void read_predicate(void *host, size_t size)
{
    if (result && size == 1)
        *(char *)host = 1;
}
