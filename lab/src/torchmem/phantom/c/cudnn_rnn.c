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

/* Kept for the backward pass, as cuDNN 9 keeps it on an H200 (experiments/phantom_truth): for each
 * layer the gates and the state (an LSTM's cell, three of a GRU), and for all layers but the last
 * their output. */
static size_t kept_bytes(const struct rnn *rnn, size_t outputs)
{
    size_t of_layer = rnn->cell == LSTM ? 5 : rnn->cell == GRU ? 6 : 1, layers = (size_t)rnn->layers;
    return outputs * (of_layer * layers + layers - 1) + 256;
}

/* An estimate, within 10% of cuDNN 9 on an H200 for most LSTMs and GRUs: gates, states and inputs of
 * all steps, the weights, 8 MiB for each direction, and ten states of a step for each layer. For an
 * LSTM of one layer in half precision, and for RNNs without gates in training, cuDNN takes up to
 * four times as much. */
static size_t workspace_bytes(const struct rnn *rnn, size_t rows, size_t outputs, size_t weights, size_t steps)
{
    size_t ways = (size_t)directions(rnn), layers = (size_t)rnn->layers, width = type_bytes(rnn->type);
    size_t of_layers = outputs * ((size_t)gates(rnn) + layers);
    size_t of_input = rows * (size_t)(rnn->input + (rnn->two_ways ? 3 * rnn->hidden : 0)) * width;
    return of_layers + of_input + weights + ways * (8 << 20) + 10 * layers * outputs / steps;
}

int cudnnGetRNNTempSpaceSizes(void *handle, void *descriptor, int mode, void *x, size_t *workspace, size_t *reserve)
{
    enum { TRAINING = 1 };
    struct rnn rnn;
    int type, layout, steps, batch, width;
    double padding;
    int error = read_rnn(descriptor, &rnn);
    if (!error)
        error = REAL(cudnnGetRNNDataDescriptor, void *, int *, int *, int *, int *, int *, int, int *, void *)(
            x, &type, &layout, &steps, &batch, &width, 0, NULL, &padding);
    if (error)
        return error;
    estimated("cuDNN");
    size_t weights, rows = (size_t)steps * (size_t)batch;
    size_t outputs = rows * (size_t)(directions(&rnn) * rnn.hidden) * type_bytes(rnn.type);
    cudnnGetRNNWeightSpaceSize(handle, descriptor, &weights);
    *workspace = workspace_bytes(&rnn, rows, outputs, weights, (size_t)steps);
    if (reserve)
        *reserve = mode == TRAINING ? kept_bytes(&rnn, outputs) : 0;
    return CUDNN_SUCCESS;
}
