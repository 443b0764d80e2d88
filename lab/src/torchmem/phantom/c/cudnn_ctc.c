/* The workspace of cuDNN's CTC loss. */
#include "cudnn.h"

int cudnnGetCTCLossWorkspaceSize(void *handle, void *probabilities, void *gradients, const int *labels,
                                 const int *label_lengths, const int *input_lengths, int algorithm, void *descriptor,
                                 size_t *bytes);
int cudnnGetCTCLossWorkspaceSize_v8(void *handle, int algorithm, void *descriptor, void *probabilities,
                                    void *gradients, size_t *bytes);

/* An estimate: forward and backward variables in single precision, one per step, sample and
 * position in the label with blanks between (2 × longest + 1), and a copy of the probabilities
 * (steps, batch, symbols). */
static int variables(void *probabilities, size_t longest, size_t *bytes)
{
    struct tensor tensor;
    int error = read_tensor(probabilities, &tensor);
    estimated("cuDNN");
    if (error)
        return error;
    size_t cells = (size_t)tensor.sizes[0] * (size_t)tensor.sizes[1];
    *bytes = sizeof(float) * (element_count(&tensor) + cells * 2 * (2 * longest + 1));
    return CUDNN_SUCCESS;
}

int cudnnGetCTCLossWorkspaceSize(void *handle, void *probabilities, void *gradients, const int *labels,
                                 const int *label_lengths, const int *input_lengths, int algorithm, void *descriptor,
                                 size_t *bytes)
{
    struct tensor tensor;
    int error = read_tensor(probabilities, &tensor), longest = 0;
    (void)handle, (void)gradients, (void)labels, (void)input_lengths, (void)algorithm, (void)descriptor;
    for (int sample = 0; !error && sample < tensor.sizes[1]; sample++)
        longest = label_lengths[sample] > longest ? label_lengths[sample] : longest;
    return error ? error : variables(probabilities, (size_t)longest, bytes);
}

int cudnnGetCTCLossWorkspaceSize_v8(void *handle, int algorithm, void *descriptor, void *probabilities,
                                    void *gradients, size_t *bytes)
{
    int type, normalisation, gradient_mode, longest;
    int error = REAL(cudnnGetCTCLossDescriptor_v9, void *, int *, int *, int *, int *)(
        descriptor, &type, &normalisation, &gradient_mode, &longest);
    (void)handle, (void)algorithm, (void)gradients;
    return error ? error : variables(probabilities, (size_t)longest, bytes);
}
