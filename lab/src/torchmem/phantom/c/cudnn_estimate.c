/* Graphs and plans for versions of cuDNN that cannot plan without a GPU (before 9.8): one plan
 * for every graph, with an estimated workspace. Tensors and operations are cuDNN's own.
 *
 * The estimate: tensor cores use NHWC, with the channels of the input in groups of 16 bytes. So
 * tensors in NCHW are copied: the input, the output, and a filter larger than 1×1. Of tensors in
 * NHWC, only an input whose channels need padding is copied. For 21 convolutions of batch 64 in
 * NCHW, most of them of a ResNet-50, the workspaces of cuDNN 9.20 for an H100 add up to the same
 * within 3 % in half precision and to 1 to 19 % less in single precision; in NHWC, a few need
 * more. */
#include "cudnn.h"

#include <pthread.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>

enum { ENGINE = 2, CONFIG = 3, HEURISTIC = 4, PLAN = 5, GRAPH = 15, TENSOR = 17, CONVOLUTION = 1 };
enum { INT64 = 3, DATA_TYPE = 1, SPATIAL_DIMENSIONS = 106 };
enum { HEURISTIC_GRAPH = 201, HEURISTIC_RESULTS = 202, PLAN_CONFIG = 401, PLAN_WORKSPACE = 402 };
enum { CONFIG_ENGINE = 300, CONFIG_WORKSPACE = 303, CONFIG_SHARED = 304 };
enum { GRAPH_OPERATIONS = 801, GRAPH_ENGINES = 802, ENGINE_GRAPH = 1300, ENGINE_INDEX = 1301 };
enum { TENSOR_TYPE = 901, TENSOR_SIZES = 902, TENSOR_STRIDES = 903 };

/* A graph, or an object made from it: heuristic, configuration, engine, plan. cuDNN copies, so it
 * must not refer to an operation or another descriptor, which may be freed. */
struct own {
    int64_t workspace;
};

static void *tree;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int compare(const void *left, const void *right)
{
    return ((uintptr_t)left > (uintptr_t)right) - ((uintptr_t)left < (uintptr_t)right);
}

bool is_estimated(void *descriptor)
{
    pthread_mutex_lock(&lock);
    bool found = tfind(descriptor, &tree, compare) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Returns false for the types that every version of cuDNN creates without a GPU. */
bool create_estimated(int type, void **descriptor)
{
    if (type != GRAPH && type != HEURISTIC && type != CONFIG && type != ENGINE && type != PLAN)
        return false;
    *descriptor = calloc(1, sizeof(struct own));
    pthread_mutex_lock(&lock);
    tsearch(*descriptor, &tree, compare);
    pthread_mutex_unlock(&lock);
    return true;
}

void destroy_estimated(void *descriptor)
{
    pthread_mutex_lock(&lock);
    tdelete(descriptor, &tree, compare);
    pthread_mutex_unlock(&lock);
    free(descriptor);
}

static bool read_backend_tensor(void *operation, int attribute, struct tensor *tensor)
{
    void *descriptor;
    int64_t sizes[MAX_DIMENSIONS], strides[MAX_DIMENSIONS], rank = 0, count;
    memset(tensor, 0, sizeof *tensor);
    if (backend_create(TENSOR, &descriptor))
        return false;
    bool read = !backend_get(operation, attribute, BACKEND_DESCRIPTOR, 1, &count, &descriptor) &&
                !backend_get(descriptor, TENSOR_TYPE, DATA_TYPE, 1, &count, &tensor->type) &&
                !backend_get(descriptor, TENSOR_SIZES, INT64, MAX_DIMENSIONS, &rank, sizes) &&
                !backend_get(descriptor, TENSOR_STRIDES, INT64, MAX_DIMENSIONS, &rank, strides);
    backend_destroy(descriptor);
    tensor->rank = read ? (int)rank : 0;
    for (int dimension = 0; dimension < tensor->rank; dimension++) {
        tensor->sizes[dimension] = (int)sizes[dimension];
        tensor->strides[dimension] = (int)strides[dimension];
    }
    return read;
}

int64_t convolution_estimate(const struct tensor *x, const struct tensor *w, const struct tensor *y, int spatial)
{
    estimated("cuDNN");
    size_t group = 16 / type_bytes(x->type), channels = 1, filter = element_count(w);
    int last_channel = x->rank - spatial - 1;
    for (int dimension = 1; dimension <= last_channel; dimension++) /* two if there are groups: the groups, their channels */
        channels *= (size_t)x->sizes[dimension];
    size_t padded = (channels + group - 1) / group * group, input = element_count(x) / channels * padded;
    bool pointwise = w->sizes[w->rank - 1] == 1 && w->sizes[w->rank - 2] == 1;
    bool channels_last = channels > 1 && x->strides[x->rank - 1] == (int)channels;
    if (x->type == CUDNN_DOUBLE || (channels_last && padded == channels))
        return 0;
    size_t moved = channels_last ? input : input + element_count(y) + (pointwise ? 0 : filter);
    return (int64_t)(moved * type_bytes(x->type));
}

/* Attributes of input, filter, output and description in the three operations of a convolution. */
static const int attributes[][4] = {{704, 703, 705, 702}, {710, 709, 711, 708}, {716, 715, 717, 714}};

static bool read_spatial(void *operation, int attribute, int64_t *spatial)
{
    void *descriptor;
    int64_t count;
    if (backend_create(CONVOLUTION, &descriptor))
        return false;
    bool read = !backend_get(operation, attribute, BACKEND_DESCRIPTOR, 1, &count, &descriptor) &&
                !backend_get(descriptor, SPATIAL_DIMENSIONS, INT64, 1, &count, spatial);
    backend_destroy(descriptor);
    return read;
}

/* Returns 0 if the operation is not a convolution. */
static int64_t operation_estimate(void *operation)
{
    struct tensor x, w, y;
    int64_t spatial;
    for (int kind = 0; kind < 3; kind++) {
        const int *names = attributes[kind];
        if (read_backend_tensor(operation, names[0], &x) && read_backend_tensor(operation, names[1], &w) &&
            read_backend_tensor(operation, names[2], &y) && read_spatial(operation, names[3], &spatial))
            return convolution_estimate(&x, &w, &y, (int)spatial);
    }
    return 0;
}

void set_estimated(struct own *own, int name, int64_t count, void *const *values)
{
    if (name == GRAPH_OPERATIONS)
        for (int64_t operation = 0; operation < count; operation++)
            own->workspace += operation_estimate(values[operation]);
    else if (name == HEURISTIC_GRAPH || name == ENGINE_GRAPH || name == CONFIG_ENGINE || name == PLAN_CONFIG)
        own->workspace = ((struct own *)values[0])->workspace;
}

/* Returns one object of each requested kind, without the optional notes of engines. */
void get_estimated(struct own *own, int name, int64_t room, int64_t *count, void *values)
{
    bool link = name == HEURISTIC_RESULTS || name == CONFIG_ENGINE;
    bool bytes = name == PLAN_WORKSPACE || name == CONFIG_WORKSPACE;
    bool number = bytes || name == GRAPH_ENGINES || name == ENGINE_INDEX;
    if (count)
        *count = link || number || name == CONFIG_SHARED;
    if (!values || room < 1)
        return;
    if (link)
        **(struct own **)values = *own;
    else if (number)
        *(int64_t *)values = bytes ? own->workspace : name == GRAPH_ENGINES;
    else if (name == CONFIG_SHARED)
        *(int32_t *)values = 0;
}
