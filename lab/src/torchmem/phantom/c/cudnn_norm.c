/* The workspace of cuDNN's batch normalization. */
#include "cudnn.h"

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations, void *activation,
                                                         void *x, size_t *bytes);
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations, void *x, void *z,
                                                             void *y, void *scale, void *activation, size_t *bytes);
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x, void *y,
                                                      void *dy, void *dz, void *dx, void *scale, void *activation,
                                                      size_t *bytes);

/* An estimate. Without a fused activation, which PyTorch does not use, nothing is kept for the
 * backward pass. */
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations, void *activation,
                                                         void *x, size_t *bytes)
{
    (void)handle, (void)mode, (void)operations, (void)activation, (void)x;
    *bytes = 0;
    return CUDNN_SUCCESS;
}

/* An estimate: `sums` partial sums in single precision, per channel and multiprocessor. */
static int partial_sums(void *x, size_t sums, size_t *bytes)
{
    struct tensor tensor;
    int error = read_tensor(x, &tensor);
    estimated("cuDNN");
    *bytes = error ? 0 : sums * sizeof(float) * (size_t)tensor.sizes[1] * (size_t)model()->multiprocessors;
    return error;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations, void *x, void *z,
                                                             void *y, void *scale, void *activation, size_t *bytes)
{
    (void)handle, (void)mode, (void)operations, (void)z, (void)y, (void)scale, (void)activation;
    return partial_sums(x, 2, bytes);
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x, void *y,
                                                      void *dy, void *dz, void *dx, void *scale, void *activation,
                                                      size_t *bytes)
{
    (void)handle, (void)mode, (void)operations, (void)y, (void)dy, (void)dz, (void)dx, (void)scale, (void)activation;
    return partial_sums(x, 2, bytes);
}
