/* Stands in for the part of libcudnn that needs a GPU: handles, streams, and calls that only
 * compute. */
#define _GNU_SOURCE
#include "cudnn.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

struct cudnn {
    void *stream;
};

int cudnnCreate(struct cudnn **handle);
int cudnnDestroy(struct cudnn *handle);
int cudnnSetStream(struct cudnn *handle, void *stream);
int cudnnGetStream(struct cudnn *handle, void **stream);
int cudnnDropoutGetStatesSize(struct cudnn *handle, size_t *bytes);

void *real_cudnn(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);
    void *call = library ? dlsym(library, name) : NULL;
    if (!call)
        stop("the phantom GPU needs cuDNN 9 for %s: install PyTorch 2.4 or newer, which includes it", name);
    return call;
}

int cudnnCreate(struct cudnn **handle)
{
    *handle = calloc(1, sizeof **handle);
    return CUDNN_SUCCESS;
}

int cudnnDestroy(struct cudnn *handle)
{
    free(handle);
    return CUDNN_SUCCESS;
}

int cudnnSetStream(struct cudnn *handle, void *stream)
{
    handle->stream = stream;
    return CUDNN_SUCCESS;
}

int cudnnGetStream(struct cudnn *handle, void **stream)
{
    *stream = handle->stream;
    return CUDNN_SUCCESS;
}

enum workspaces workspaces(void)
{
    const char *set = getenv("PHANTOM_CUDNN_WORKSPACE");
    if (!set || !*set)
        return ASKED;
    if (strcmp(set, "0") && strcmp(set, "estimate"))
        stop("PHANTOM_CUDNN_WORKSPACE=%s is invalid: set it to 0 or estimate, or unset it", set);
    return *set == '0' ? NONE : ESTIMATED;
}

int read_tensor(void *descriptor, struct tensor *t)
{
    return REAL(cudnnGetTensorNdDescriptor, void *, int, int *, int *, int *, int *)(
        descriptor, MAX_DIMENSIONS, &t->type, &t->rank, t->sizes, t->strides);
}

size_t type_bytes(int type)
{
    return type == CUDNN_DOUBLE ? 8 : type == CUDNN_HALF || type == CUDNN_BFLOAT16 ? 2 : 4;
}

size_t element_count(const struct tensor *tensor)
{
    size_t count = 1;
    for (int dimension = 0; dimension < tensor->rank; dimension++)
        count *= (size_t)tensor->sizes[dimension];
    return count;
}

/* An estimate: one generator of cuRAND's default type (48 bytes) per thread that can be resident
 * on the GPU. */
int cudnnDropoutGetStatesSize(struct cudnn *handle, size_t *bytes)
{
    enum { THREADS_OF_A_MULTIPROCESSOR = 39, GENERATOR_BYTES = 48 };
    int threads = 0;
    (void)handle;
    device_attribute(THREADS_OF_A_MULTIPROCESSOR, gpu_of(current_device()), &threads);
    *bytes = (size_t)model()->multiprocessors * (size_t)threads * GENERATOR_BYTES;
    return CUDNN_SUCCESS;
}

WORK(cudnnSetDropoutDescriptor)
WORK(cudnnRestoreDropoutDescriptor)
WORK(cudnnBatchNormalizationForwardInference)
WORK(cudnnBatchNormalizationForwardTrainingEx)
WORK(cudnnBatchNormalizationBackwardEx)
WORK(cudnnConvolutionForward)
WORK(cudnnConvolutionBackwardData)
WORK(cudnnConvolutionBackwardFilter)
WORK(cudnnConvolutionBiasActivationForward)
WORK(cudnnCTCLoss)
WORK(cudnnCTCLoss_v8)
WORK(cudnnPoolingForward)
WORK(cudnnRNNForward)
WORK(cudnnRNNBackwardData_v8)
WORK(cudnnRNNBackwardWeights_v8)
WORK(cudnnSpatialTfGridGeneratorForward)
WORK(cudnnSpatialTfGridGeneratorBackward)
WORK(cudnnSpatialTfSamplerForward)
WORK(cudnnSpatialTfSamplerBackward)
