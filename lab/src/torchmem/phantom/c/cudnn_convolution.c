/* The older cuDNN calls for convolutions, which PyTorch uses with TORCH_CUDNN_V8_API_DISABLED=1:
 * one algorithm for all, with the workspace of convolution_estimate(). */
#include "cudnn.h"

/* cudnnConvolutionFwdAlgoPerf_t and its counterparts for the two backward directions. */
struct performance {
    int algorithm, status;
    float milliseconds;
    size_t memory;
    int deterministic, math, reserved[3];
};

static int read_filter(void *descriptor, struct tensor *filter)
{
    int format;
    return REAL(cudnnGetFilterNdDescriptor, void *, int, int *, int *, int *, int *)(
        descriptor, MAX_DIMENSIONS, &filter->type, &format, &filter->rank, filter->sizes);
}

static int workspace(void *x, void *w, void *y, size_t *bytes)
{
    struct tensor input = {0}, filter = {0}, output = {0};
    int error = read_tensor(x, &input);
    error = error ? error : read_filter(w, &filter);
    error = error ? error : read_tensor(y, &output);
    *bytes = error || workspaces() == NONE
                 ? 0
                 : (size_t)convolution_estimate(&input, &filter, &output, input.rank - 2);
    return error;
}

/* Algorithm 1 uses tensor cores in all three enumerations of cudnn_cnn.h. */
static int choose(void *x, void *w, void *y, int requested, int *count, struct performance *results)
{
    enum { MATH_TENSOR = 1, DETERMINISTIC = 1, ALGORITHM = 1 };
    size_t bytes;
    int error = workspace(x, w, y, &bytes);
    *count = !error && requested > 0;
    if (*count)
        results[0] = (struct performance){.algorithm = ALGORITHM, .milliseconds = 1, .memory = bytes,
                                          .deterministic = DETERMINISTIC, .math = MATH_TENSOR};
    return error;
}

/* The three directions differ in the order of input, filter and output. */
#define DIRECTION(name, a, b, c)                                                                                     \
    int cudnnGetConvolution##name##WorkspaceSize(void *handle, void *a, void *b, void *convolution, void *c,         \
                                                 int algorithm, size_t *bytes);                                      \
    int cudnnGetConvolution##name##WorkspaceSize(void *handle, void *a, void *b, void *convolution, void *c,         \
                                                 int algorithm, size_t *bytes)                                       \
    {                                                                                                                \
        (void)handle, (void)convolution, (void)algorithm;                                                            \
        return workspace(x, w, y, bytes);                                                                            \
    }                                                                                                                \
    int cudnnGetConvolution##name##Algorithm_v7(void *handle, void *a, void *b, void *convolution, void *c,          \
                                                int requested, int *count, struct performance *results);             \
    int cudnnGetConvolution##name##Algorithm_v7(void *handle, void *a, void *b, void *convolution, void *c,          \
                                                int requested, int *count, struct performance *results)              \
    {                                                                                                                \
        (void)handle, (void)convolution;                                                                             \
        return choose(x, w, y, requested, count, results);                                                           \
    }                                                                                                                \
    int cudnnFindConvolution##name##AlgorithmEx(void *handle, void *a, void *data_a, void *b, void *data_b,          \
                                                void *convolution, void *c, void *data_c, int requested, int *count, \
                                                struct performance *results);                                        \
    int cudnnFindConvolution##name##AlgorithmEx(void *handle, void *a, void *data_a, void *b, void *data_b,          \
                                                void *convolution, void *c, void *data_c, int requested, int *count, \
                                                struct performance *results)                                         \
    {                                                                                                                \
        (void)handle, (void)convolution, (void)data_a, (void)data_b, (void)data_c;                                   \
        return choose(x, w, y, requested, count, results);                                                           \
    }

DIRECTION(Forward, x, w, y)
DIRECTION(BackwardData, w, y, x)
DIRECTION(BackwardFilter, x, y, w)
