/* Values that follow from zeros. No kernel computes anything, and every value on a GPU counts as
 * zero; but `x == 0` is then true, and so is what `all()` or `max()` makes of it. Tensors that hold
 * one known value other than zero are kept here by their address: results of comparisons and logical
 * operations, what reductions and casts make of them, small tensors that were filled with a value or
 * are the exponential of one, and small tensors that the host wrote, as if all their elements were the
 * first one.
 *
 * The operation is recognized by the name of the PyTorch kernel, and operands are found in its
 * arguments, as in the binaries of 2.13 (aten/src/ATen/native/cuda: CompareEQKernel.cu,
 * CompareKernels.cu, Reduce.cuh, CUDALoops.cuh, ...). The result of any other kernel is zero.
 *
 * Memory may be reused by a kernel whose outputs are unknown. A value is therefore read back only
 * until such a kernel runs; as an operand it is used until a known kernel writes to its address. */
#include "cudart.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { ROOM = 1 << 17, MAX_VALUES = 256, MAX_HOST_BYTES = 64, MAX_BYTES = 1 << 16, PATTERN_BYTES = 8 };
enum { NOT_READABLE }; /* the epoch of values that the host wrote: host_writes.c reads those back */
enum shape { NO_SHAPE, VECTORIZED, OFFSETS, REDUCTION };
enum operation {
    UNKNOWN, FILL, EXP, SIGMOID, SOFTPLUS, COPY, LOGICAL_NOT, BITWISE_NOT, EQUAL_SCALAR, COMPARE_SCALAR,
    EQUAL, COMPARE, BIT_AND, BIT_OR, BIT_XOR, LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR, MULTIPLY, ALL, ANY, EXTREME, MEAN, SUM
};

/* `type`: mangled C++ type of the operands; 'H' and 'B' for half and bfloat16. */
static struct kernel {
    const void *function;
    unsigned char shape, operation;
    char type;
} kernels[ROOM];
static size_t registered;

/* All elements of a tensor, as bytes that repeat. */
static struct value {
    uintptr_t start;
    size_t size;
    unsigned char pattern[PATTERN_BYTES];
    unsigned long epoch;
} values[MAX_VALUES];
static atomic_int used;
static int next_value;
static unsigned long epoch = NOT_READABLE + 1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Registration: which operation a kernel is. */

static char type_at(const char *name)
{
    if (strncmp(name, "N3c10", 5))
        return *name;
    return !strncmp(name + 5, "4HalfE", 6) ? 'H' : !strncmp(name + 5, "8BFloat16E", 10) ? 'B' : 0;
}

static char type_after(const char *name, const char *marker)
{
    const char *place = strstr(name, marker);
    return place ? type_at(place + strlen(marker)) : 0;
}

/* The type of the operands is `type`, or follows `prefix`, or follows `marker` after `word`. */
static const struct rule {
    unsigned char shapes, operation;
    const char *prefix, *word, *marker;
    char type;
} rules[] = {
#define MAPS (1 << VECTORIZED | 1 << OFFSETS)
#define REDUCES (1 << REDUCTION)
    {MAPS, FILL, "", "11FillFunctorI", "I", 0},
    {MAPS, EXP, "", "15exp_kernel_cuda", "EUl", 0},
    {MAPS, SIGMOID, "", "19sigmoid_kernel_cuda", "EUl", 0},
    {MAPS, SOFTPLUS, "", "15softplus_kernel", "EUl", 0},
    {MAPS, COPY, "", "23direct_copy_kernel_cuda", "EUl", 0},
    {MAPS, COPY, "", "24float16_copy_kernel_cuda", "", 'H'},
    {MAPS, COPY, "", "25bfloat16_copy_kernel_cuda", "", 'B'},
    {MAPS, LOGICAL_NOT, "", "23logical_not_kernel_cuda", "EUl", 0},
    {MAPS, BITWISE_NOT, "", "23bitwise_not_kernel_cuda", "EUl", 0},
    {MAPS, EQUAL_SCALAR, "UnaryFunctorI", "16CompareEqFunctor", "I", 0},
    {MAPS, COMPARE_SCALAR, "", "21compare_scalar_kernel", "I", 0},
    {MAPS, EQUAL, "BinaryFunctorI", "16CompareEqFunctor", "I", 0},
    {MAPS, COMPARE, "", "14CompareFunctor", "I", 0},
    {MAPS, BIT_AND, "BinaryFunctorI", "17BitwiseAndFunctor", "I", 0},
    {MAPS, BIT_OR, "BinaryFunctorI", "16BitwiseOrFunctor", "I", 0},
    {MAPS, BIT_XOR, "BinaryFunctorI", "17BitwiseXorFunctor", "I", 0},
    {MAPS, LOGICAL_AND, "BinaryFunctorI", "23logical_and_kernel_cuda", "EUl", 0},
    {MAPS, LOGICAL_OR, "BinaryFunctorI", "22logical_or_kernel_cuda", "EUl", 0},
    {MAPS, LOGICAL_XOR, "BinaryFunctorI", "23logical_xor_kernel_cuda", "EUl", 0},
    {MAPS, MULTIPLY, "BinaryFunctorI", "10MulFunctor", "I", 0},
    {REDUCES, ALL, "8ReduceOpI", "15and_kernel_cuda", "", 0},
    {REDUCES, ANY, "8ReduceOpI", "14or_kernel_cuda", "", 0},
    {REDUCES, EXTREME, "8ReduceOpI", "13MaxNanFunctor", "", 0},
    {REDUCES, EXTREME, "8ReduceOpI", "13MinNanFunctor", "", 0},
    {REDUCES, MEAN, "8ReduceOpI", "7MeanOps", "", 0},
    {REDUCES, SUM, "8ReduceOpI", "11sum_functor", "", 0},
};

static enum shape shape_of(const char *name)
{
    if (strstr(name, "29vectorized_elementwise_kernelI") || strstr(name, "27unrolled_elementwise_kernelI"))
        return VECTORIZED;
    if (strstr(name, "18elementwise_kernelI"))
        return strstr(name, "22gpu_kernel_impl_nocastI") ? OFFSETS : NO_SHAPE;
    return strstr(name, "13reduce_kernelI") ? REDUCTION : NO_SHAPE;
}

static struct kernel described(const char *name)
{
    struct kernel kernel = {.shape = shape_of(name)};
    for (const struct rule *rule = rules; rule < rules + sizeof rules / sizeof *rules; rule++) {
        if (!(rule->shapes >> kernel.shape & 1) || !strstr(name, rule->prefix) || !strstr(name, rule->word))
            continue;
        kernel.operation = rule->operation;
        kernel.type = rule->type      ? rule->type
                    : *rule->prefix ? type_after(name, rule->prefix)
                                    : type_after(strstr(name, rule->word), rule->marker);
        break;
    }
    return kernel;
}

static size_t row_of(const void *function)
{
    size_t row = ((uintptr_t)function >> 4) % ROOM;
    while (kernels[row].function && kernels[row].function != function)
        row = (row + 1) % ROOM;
    return row;
}

void register_kernel(const void *function, const char *name)
{
    struct kernel kernel = described(name);
    if (!kernel.shape)
        return;
    pthread_mutex_lock(&lock);
    struct kernel *row = &kernels[row_of(function)];
    if (registered < ROOM / 2 && !row->function) {
        row->shape = kernel.shape, row->operation = kernel.operation, row->type = kernel.type;
        __atomic_store_n(&row->function, function, __ATOMIC_RELEASE);
        registered++;
    }
    pthread_mutex_unlock(&lock);
}

/* Numbers in the GPU's types. */

static size_t size_of(char type)
{
    switch (type) {
    case 'b': case 'h': case 'a': return 1;
    case 's': case 'H': case 'B': return 2;
    case 'i': case 'f': return 4;
    case 'l': case 'd': return 8;
    default: return 0;
    }
}

static double half(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                 : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits >> 15 ? -size : size;
}

#define NUMBER(type)                          \
    {                                         \
        type number;                          \
        memcpy(&number, from, sizeof number); \
        return (double)number;                \
    }

static double number_at(const void *from, char type)
{
    uint16_t bits;
    uint32_t wide;
    float single;
    switch (type) {
    case 'b': case 'h': NUMBER(uint8_t)
    case 'a': NUMBER(int8_t)
    case 's': NUMBER(int16_t)
    case 'i': NUMBER(int32_t)
    case 'l': NUMBER(int64_t)
    case 'f': NUMBER(float)
    case 'd': NUMBER(double)
    case 'H': memcpy(&bits, from, sizeof bits); return half(bits);
    case 'B':
        memcpy(&bits, from, sizeof bits);
        wide = (uint32_t)bits << 16;
        memcpy(&single, &wide, sizeof single);
        return single;
    default: return 0;
    }
}

/* `number` is 1 if the type has 16-bit floating-point numbers. */
static void encode(unsigned char pattern[PATTERN_BYTES], double number, char type)
{
    int8_t byte = (int8_t)(int64_t)number;
    int16_t two = type == 'H' ? 0x3C00 : type == 'B' ? 0x3F80 : (int16_t)number;
    int32_t four = (int32_t)number;
    int64_t eight = (int64_t)number;
    float single = (float)number;
    size_t size = size_of(type);
    const void *from = type == 'f' ? (void *)&single : type == 'd' ? (void *)&number
                     : size == 1 ? (void *)&byte : size == 2 ? (void *)&two
                     : size == 4 ? (void *)&four : (void *)&eight;
    for (size_t at = 0; at < PATTERN_BYTES; at += size)
        memcpy(pattern + at, from, size);
}

/* The table. The lock is held. */

static void drop(uintptr_t start, size_t size)
{
    for (struct value *value = values; value < values + used; value++)
        if (value->start < start + size && start < value->start + value->size)
            value->size = 0;
}

static struct value *add(uintptr_t start, size_t size)
{
    if (used < MAX_VALUES)
        next_value = used++;
    else
        next_value = (next_value + 1) % MAX_VALUES;
    values[next_value] = (struct value){.start = start, .size = size};
    return &values[next_value];
}

static const struct value *value_at(uintptr_t start)
{
    for (const struct value *value = values; value < values + used; value++)
        if (value->size && value->start <= start && start < value->start + value->size)
            return value;
    return NULL;
}

static double operand(uintptr_t start, char type)
{
    const struct value *value = value_at(start);
    size_t size = size_of(type);
    if (!value || !size)
        return 0;
    /* An operand of another type has been cast while it was loaded; only booleans are. */
    bool repeats = !memcmp(value->pattern, value->pattern + size % PATTERN_BYTES, PATTERN_BYTES - size);
    bool fits = repeats && value->size % size == 0;
    bool of_bools = value->pattern[0] == 1 && value->pattern[1] == 1;
    return of_bools && type != 'b' ? 1 : fits ? number_at(value->pattern, type) : 0;
}

static void set(uintptr_t start, size_t count, double number, char type)
{
    size_t size = size_of(type);
    bool has_encoding = size && (number == 1 || (type != 'H' && type != 'B'));
    drop(start, size ? count * size : count);
    if (number == 0 || !has_encoding)
        return;
    struct value *value = add(start, count * size);
    value->epoch = epoch;
    encode(value->pattern, number, type);
}

/* Operations */

static bool compares(int comparison, double left, double right)
{
    switch (comparison) {
    case 0: return left >= right;
    case 1: return left > right;
    case 2: return left <= right;
    case 3: return left < right;
    default: return false;
    }
}

/* The number follows the kind of comparison, an int. */
static double scalar_of(const struct kernel *kernel, const char *functor)
{
    size_t size = size_of(kernel->type);
    return number_at(functor + (size > 4 ? size : 4), kernel->type);
}

/* torch.istft rejects a window whose overlaps are less than 1e-11 somewhere; it must not fail because
 * windows are zeros here (aten/src/ATen/native/SpectralOps.cpp). */
static bool is_istft_check(int comparison, double scalar) { return comparison == 3 && fabs(scalar / 1e-11 - 1) < 1e-6; }

static double result_of(const struct kernel *kernel, const char *functor, double left, double right)
{
    int comparison;
    int64_t first = (int64_t)left, second = (int64_t)right;
    memcpy(&comparison, functor, sizeof comparison);
    switch (kernel->operation) {
    case FILL: return number_at(functor, kernel->type);
    case EXP: return exp(left);
    case SIGMOID: return 1 / (1 + exp(-left));
    case SOFTPLUS: return log1p(exp(left));
    case COPY: return kernel->type == 'b' ? left != 0 : left;
    case LOGICAL_NOT: return left == 0;
    case BITWISE_NOT: return kernel->type == 'b' ? left == 0 : (double)~first;
    case EQUAL_SCALAR: return (left == scalar_of(kernel, functor)) == (comparison == 0);
    case EQUAL: return (left == right) == (comparison == 0);
    case COMPARE_SCALAR: return !is_istft_check(comparison, scalar_of(kernel, functor))
                             && compares(comparison, left, scalar_of(kernel, functor));
    case COMPARE: return compares(comparison, left, right);
    case BIT_AND: return (double)(first & second);
    case BIT_OR: return (double)(first | second);
    case BIT_XOR: return (double)(first ^ second);
    case LOGICAL_AND: return left && right;
    case LOGICAL_OR: return left || right;
    case LOGICAL_XOR: return !left != !right;
    case MULTIPLY: return left * right;
    default: return 0;
    }
}

static char type_of_result(const struct kernel *kernel)
{
    switch (kernel->operation) {
    case UNKNOWN: return 0;
    case LOGICAL_NOT: case EQUAL_SCALAR: case COMPARE_SCALAR: case EQUAL: case COMPARE:
    case LOGICAL_AND: case LOGICAL_OR: case LOGICAL_XOR: case ALL: case ANY:
        return 'b';
    default: return kernel->type;
    }
}

static int operands_of(const struct kernel *kernel)
{
    return kernel->operation <= FILL ? 0 : kernel->operation <= COMPARE_SCALAR ? 1 : 2;
}

/* `pointers`: the output, then the operands. */
static void mapped(const struct kernel *kernel, size_t count, const char *functor, const uintptr_t *pointers)
{
    int operands = operands_of(kernel);
    double left = operands > 0 ? operand(pointers[1], kernel->operation == COPY ? 'b' : kernel->type) : 0;
    double right = operands > 1 ? operand(pointers[2], kernel->type) : 0;
    double number = kernel->operation ? result_of(kernel, functor, left, right) : 0;
    char type = type_of_result(kernel);
    bool is_kept = operands > 1 || type == 'b' || count * size_of(type) <= MAX_BYTES;
    set(pointers[0], count, is_kept ? number : 0, type);
}

/* The lambda of gpu_kernel_impl_nocast: OffsetCalculator (dimensions, 25 dividers, 25 strides for each
 * tensor), pointers, functor. */
static void mapped_with_offsets(const struct kernel *kernel, size_t count, const char *lambda)
{
    size_t tensors = (size_t)operands_of(kernel) + 1;
    size_t calculator = (4 + 25 * 12 + 25 * 4 * tensors + 7) / 8 * 8;
    uintptr_t pointers[3];
    memcpy(pointers, lambda + calculator, tensors * sizeof *pointers);
    if (kernel->operation)
        mapped(kernel, count, lambda + calculator + tensors * sizeof *pointers, pointers);
}

/* ReduceOp: functor, identity, ReduceConfig (element size, inputs per output, outputs, ...), offset
 * calculators, source, destination. Functor and identity have the size of a number each, and an
 * alignment of at least 4. */
enum { CONFIG_BYTES = 64, CALCULATORS_BYTES = 404 + 504 };

/* Returns false if the source and the destination are not where they are expected. */
static bool ends_of(const char *reduction, size_t config, uintptr_t ends[2])
{
    memcpy(ends, reduction + (config + CONFIG_BYTES + CALCULATORS_BYTES + 7) / 8 * 8, 2 * sizeof *ends);
    return on_device((void *)ends[0]) && on_device((void *)ends[1]);
}

static void reduced_to_zero(const char *reduction)
{
    uintptr_t ends[2];
    for (size_t config = 4; config <= 48; config += 4)
        if (ends_of(reduction, config, ends))
            drop(ends[1], 1);
}

static void reduced(const struct kernel *kernel, const char *reduction)
{
    bool is_logical = kernel->operation == ALL || kernel->operation == ANY;
    bool is_wide = kernel->operation == MEAN || kernel->operation == SUM;
    size_t size = is_logical ? 1 : size_of(kernel->type);
    size_t config = 2 * (size < 4 && is_wide ? 4 : size < 2 ? 2 : size);
    uintptr_t ends[2];
    int sizes[3];
    if (!kernel->operation || !ends_of(reduction, config, ends)) {
        reduced_to_zero(reduction);
        return;
    }
    memcpy(sizes, reduction + config, sizeof sizes);
    double number = operand(ends[0], kernel->type);
    if (is_logical)
        number = number != 0;
    else if (kernel->operation == SUM)
        number *= sizes[1];
    set(ends[1], sizes[2] > 0 ? (size_t)sizes[2] : 1, number, type_of_result(kernel));
}

void kernel_launched(const void *function, void **arguments)
{
    const struct kernel *kernel = &kernels[row_of(function)];
    if (!kernel->function) {
        work_ran();
        return;
    }
    if (!kernel->operation && !used)
        return;
    pthread_mutex_lock(&lock);
    if (kernel->shape == REDUCTION)
        reduced(kernel, arguments[0]);
    else {
        int count;
        memcpy(&count, arguments[0], sizeof count);
        if (kernel->shape == VECTORIZED)
            mapped(kernel, (size_t)count, arguments[1], arguments[2]);
        else
            mapped_with_offsets(kernel, (size_t)count, arguments[1]);
    }
    pthread_mutex_unlock(&lock);
}

void work_ran(void) { __atomic_fetch_add(&epoch, 1, __ATOMIC_RELAXED); }

/* Other requests of the host */

/* Whether it is one element, or several of 64 bits, and none of them is zero. */
static bool is_kept(const void *host, size_t size)
{
    static const char zeros[PATTERN_BYTES];
    bool is_one = size == 1 || size == 2 || size == 4 || size == 8;
    bool is_kept = is_one || (size && size <= MAX_HOST_BYTES && size % PATTERN_BYTES == 0);
    for (size_t at = 0; is_kept && at < size; at += PATTERN_BYTES)
        is_kept = memcmp((const char *)host + at, zeros, is_one ? size : PATTERN_BYTES) != 0;
    return is_kept;
}

void keep_host_value(const void *device, const void *host, size_t size)
{
    pthread_mutex_lock(&lock);
    drop((uintptr_t)device, size);
    if (is_kept(host, size)) {
        struct value *value = add((uintptr_t)device, size);
        for (size_t at = 0; at < PATTERN_BYTES; at++)
            value->pattern[at] = ((const unsigned char *)host)[at % size];
    }
    pthread_mutex_unlock(&lock);
}

void copy_value(const void *to, const void *from, size_t size)
{
    if (!used)
        return;
    pthread_mutex_lock(&lock);
    const struct value *value = value_at((uintptr_t)from);
    struct value copied = value ? *value : (struct value){0};
    drop((uintptr_t)to, size);
    if (copied.size && (uintptr_t)from + size <= copied.start + copied.size) {
        copied.start = (uintptr_t)to, copied.size = size;
        *add(copied.start, size) = copied;
    }
    pthread_mutex_unlock(&lock);
}

void forget_value(const void *device, size_t size)
{
    if (!used)
        return;
    pthread_mutex_lock(&lock);
    drop((uintptr_t)device, size);
    pthread_mutex_unlock(&lock);
}

/* Leaves `host` unchanged if the value is not known. */
void read_value(void *host, const void *device, size_t size)
{
    if (!used)
        return;
    pthread_mutex_lock(&lock);
    const struct value *value = value_at((uintptr_t)device);
    bool is_known = value && value->epoch == epoch && (uintptr_t)device + size <= value->start + value->size;
    for (size_t at = 0; is_known && at < size; at++)
        ((unsigned char *)host)[at] = value->pattern[((uintptr_t)device - value->start + at) % PATTERN_BYTES];
    pthread_mutex_unlock(&lock);
}
