/* What a card says to a yes-or-no question that nothing has computed. Zero would say "no" to every `all()`, and to
 * "is all of this finite?"; the answer is that of a tensor of zeros instead: `all()`, `isfinite`, "not" are true,
 * and a comparison with a number is that of zero with it. Everything else stays no.
 *
 * The question is known by the name of the PyTorch kernel that was launched last, as the binaries of 2.13 carry it
 * (aten/src/ATen/native/cuda: ReduceLogicKernel.cu, CompareKernels.cu, BinaryMulKernel.cu, UnaryOpsKernel.cu). Under
 * another name it is not known, and the answer is no. */
#include "cudart.h"

#include <pthread.h>
#include <string.h>

enum { ROOM = 4096, YES = 'Y' };

/* `question`: YES, or the letter of the numbers compared, as C++ mangles it; 'H' for 16-bit floating point. */
static struct {
    const void *function;
    char question;
} questions[ROOM];
static size_t known;
static __thread bool verdict;

static char question_of(const char *name)
{
    static const char comparison[] = "21compare_scalar_kernelI";
    const char *found = strstr(name, comparison);
    if (found) {
        found += sizeof comparison - 1;
        return strncmp(found, "N3c10", 5) ? *found : strstr(found, "4HalfE") || strstr(found, "8BFloat16E") ? 'H' : 0;
    }
    bool is_not = strstr(name, "23logical_not_kernel_cuda") || strstr(name, "23bitwise_not_kernel_cuda");
    bool of_bools = strstr(name, "EUlbE_") != NULL;
    return strstr(name, "15and_kernel_cuda") || strstr(name, "MulFunctorIbE") || (is_not && of_bools) ? YES : 0;
}

static size_t row_of(const void *function)
{
    size_t row = ((uintptr_t)function >> 4) % ROOM;
    while (questions[row].function && questions[row].function != function)
        row = (row + 1) % ROOM;
    return row;
}

void learn_kernel(const void *function, const char *name)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    char question = question_of(name);
    if (!question)
        return;
    pthread_mutex_lock(&lock);
    size_t row = row_of(function);
    if (known < ROOM / 2 && !questions[row].function) {
        questions[row].question = question;
        __atomic_store_n(&questions[row].function, function, __ATOMIC_RELEASE);
        known++;
    }
    pthread_mutex_unlock(&lock);
}

#define SIGN(type)                          \
    {                                       \
        type value;                         \
        memcpy(&value, at, sizeof value);   \
        return (value > 0) - (value < 0);   \
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
    default: SIGN(int16_t) /* 16-bit floating point has its sign where integers have it */
    }
}

/* `lambda`: which comparison (OpType: >=, >, <=, <), then the number. */
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

void hear_kernel(const void *function, void **arguments)
{
    size_t row = row_of(function);
    char question = questions[row].function ? questions[row].question : 0;
    verdict = question == YES || (question && strchr("fdlisahH", question) && zero_compares(question, arguments[1]));
}

void forget_verdict(void) { verdict = false; }

/* A yes or no is one byte. */
void answer_question(void *host, size_t size)
{
    if (verdict && size == 1)
        *(char *)host = 1;
}
