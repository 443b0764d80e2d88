/* cuDNN's recurrent networks: where a weight is in their single buffer, and their workspaces. */
#include "cudnn.h"

enum cell { RELU, TANH, LSTM, GRU };

/* The values returned by cudnnGetRNNDescriptor_v8. projection is the width of the output, `hidden`
 * without a projection. */
struct rnn {
    int algorithm, cell, bias, two_ways, input_mode, type, precision, math, input, hidden, projection, layers;
    void *dropout;
    unsigned flags;
};

int cudnnGetRNNWeightSpaceSize(void *handle, void *descriptor, size_t *bytes);
int cudnnGetRNNWeightParams(void *handle, void *descriptor, int pseudo_layer, size_t bytes, char *weights, int linear,
                            void *matrix_descriptor, void **matrix, void *bias_descriptor, void **bias);
int cudnnGetRNNTempSpaceSizes(void *handle, void *descriptor, int mode, void *x, size_t *workspace, size_t *reserve);

static int read_rnn(void *descriptor, struct rnn *r)
{
    return REAL(cudnnGetRNNDescriptor_v8, void *, int *, int *, int *, int *, int *, int *, int *, int *, int *, int *,
                int *, int *, void **, unsigned *)(descriptor, &r->algorithm, &r->cell, &r->bias, &r->two_ways,
                                                   &r->input_mode, &r->type, &r->precision, &r->math, &r->input,
                                                   &r->hidden, &r->projection, &r->layers, &r->dropout, &r->flags);
}

static int gates(const struct rnn *rnn) { return rnn->cell == LSTM ? 4 : rnn->cell == GRU ? 3 : 1; }

static int directions(const struct rnn *rnn) { return rnn->two_ways ? 2 : 1; }

/* Matrices of a pseudo-layer, in cuDNN's order: input, recurrent, projection. */
static int matrix_count(const struct rnn *rnn) { return 2 * gates(rnn) + (rnn->projection != rnn->hidden); }

static void matrix_shape(const struct rnn *rnn, int pseudo_layer, int linear, size_t *rows, size_t *columns)
{
    bool first = pseudo_layer < directions(rnn), projects = linear == 2 * gates(rnn);
    size_t out = (size_t)rnn->projection, below = first ? (size_t)rnn->input : out * (size_t)directions(rnn);
    *rows = projects ? out : (size_t)rnn->hidden;
    *columns = projects ? (size_t)rnn->hidden : linear < gates(rnn) ? below : out;
}

/* Returns the elements before this matrix; for the index after the last matrix, those of all of
 * them. */
static size_t matrix_offset(const struct rnn *rnn, int pseudo_layer, int linear)
{
    size_t offset = 0, rows, columns;
    for (int before = 0; before <= pseudo_layer; before++)
        for (int id = 0; id < (before < pseudo_layer ? matrix_count(rnn) : linear); id++) {
            matrix_shape(rnn, before, id, &rows, &columns);
            offset += rows * columns;
        }
    return offset;
}

static size_t biases_of_layer(const struct rnn *rnn)
{
    enum { NONE, DOUBLE = 2 };
    return rnn->bias == NONE ? 0 : (size_t)(gates(rnn) * rnn->hidden * (rnn->bias == DOUBLE ? 2 : 1));
}

static size_t matrices_of_all(const struct rnn *rnn)
{
    return matrix_offset(rnn, rnn->layers * directions(rnn), 0);
}

int cudnnGetRNNWeightSpaceSize(void *handle, void *descriptor, size_t *bytes)
{
    struct rnn rnn;
    int error = read_rnn(descriptor, &rnn);
    (void)handle;
    if (!error) {
        size_t biases = biases_of_layer(&rnn) * (size_t)(rnn.layers * directions(&rnn));
        *bytes = (matrices_of_all(&rnn) + biases) * type_bytes(rnn.type);
    }
    return error;
}

static int describe(void *descriptor, int type, size_t rows, size_t columns)
{
    int sizes[3] = {1, (int)rows, (int)columns}, strides[3] = {(int)(rows * columns), (int)columns, 1};
    return REAL(cudnnSetTensorNdDescriptor, void *, int, int, const int *, const int *)(descriptor, type, 3, sizes,
                                                                                        strides);
}

static int give_matrix(const struct rnn *rnn, int pseudo_layer, int linear, char *weights, void *descriptor,
                       void **address)
{
    size_t rows, columns;
    matrix_shape(rnn, pseudo_layer, linear, &rows, &columns);
    *address = weights + matrix_offset(rnn, pseudo_layer, linear) * type_bytes(rnn->type);
    return describe(descriptor, rnn->type, rows, columns);
}

static int give_bias(const struct rnn *rnn, int pseudo_layer, int linear, char *weights, void *descriptor,
                     void **address)
{
    size_t of_layer = biases_of_layer(rnn), before = (size_t)(linear * rnn->hidden);
    if (before >= of_layer)
        return CUDNN_SUCCESS;
    size_t offset = matrices_of_all(rnn) + of_layer * (size_t)pseudo_layer + before;
    *address = weights + offset * type_bytes(rnn->type);
    return describe(descriptor, rnn->type, (size_t)rnn->hidden, 1);
}

/* All weights of a module are in one buffer: the matrices by layer, then the biases. PyTorch asks
 * for either a matrix or a bias and passes no pointer for the other. The address stays null if
 * there is none. */
int cudnnGetRNNWeightParams(void *handle, void *descriptor, int pseudo_layer, size_t bytes, char *weights, int linear,
                            void *matrix_descriptor, void **matrix, void *bias_descriptor, void **bias)
{
    struct rnn rnn;
    int error = read_rnn(descriptor, &rnn);
    (void)handle, (void)bytes;
    if (matrix)
        *matrix = NULL;
    if (bias)
        *bias = NULL;
    if (!error && matrix && linear < matrix_count(&rnn))
        error = give_matrix(&rnn, pseudo_layer, linear, weights, matrix_descriptor, matrix);
    return error || !bias ? error : give_bias(&rnn, pseudo_layer, linear, weights, bias_descriptor, bias);
}

/* Estimates, in elements of the data type per sample and step. Kept for the backward pass, per
 * layer: gates, state (the cell of an LSTM, the recurrent part of a GRU's new gate) and output.
 * Workspace: the gates of one layer, which one matrix product computes for all steps. */
int cudnnGetRNNTempSpaceSizes(void *handle, void *descriptor, int mode, void *x, size_t *workspace, size_t *reserve)
{
    enum { TRAINING = 1 };
    struct rnn rnn;
    int type, layout, steps, batch, width;
    double padding;
    int error = read_rnn(descriptor, &rnn);
    (void)handle;
    if (!error)
        error = REAL(cudnnGetRNNDataDescriptor, void *, int *, int *, int *, int *, int *, int, int *, void *)(
            x, &type, &layout, &steps, &batch, &width, 0, NULL, &padding);
    if (error)
        return error;
    estimated("cuDNN");
    size_t cells = (size_t)steps * (size_t)batch * (size_t)(directions(&rnn) * rnn.hidden) * type_bytes(rnn.type);
    size_t kept = (size_t)gates(&rnn) + 1 + (rnn.cell == LSTM || rnn.cell == GRU);
    *workspace = cells * (size_t)gates(&rnn);
    if (reserve)
        *reserve = mode == TRAINING ? cells * kept * (size_t)rnn.layers : 0;
    return CUDNN_SUCCESS;
}
