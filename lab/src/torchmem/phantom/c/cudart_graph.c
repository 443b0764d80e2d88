/* Stands in for libcudart: capture and launch of graphs. A graph contains no work; its memory is
 * what PyTorch's allocator keeps for it in a private pool. */
#include "cudart.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Never freed: streams and events may refer to it as long as they live. */
struct capture {
    bool open, failed;
    int mode;
    pthread_t thread;
    unsigned long long id;
    struct capture *next;
};

static _Atomic(struct capture *) newest_capture;
static _Thread_local int interaction_mode = cudaStreamCaptureModeGlobal;

bool capture_open(const struct capture *capture) { return capture && capture->open; }

/* A graph cannot contain a wait of the host: CUDA returns an error and invalidates the capture. */
cudaError_t wait_in_capture(struct capture *capture)
{
    if (!capture_open(capture))
        return cudaSuccess;
    capture->failed = true;
    return cudaErrorStreamCaptureUnsupported;
}

/* Whether a capture prohibits calls such as cudaFree in this thread, as cudaThreadExchangeStreamCaptureMode explains. */
static bool prohibits(const struct capture *capture)
{
    if (!capture->open || interaction_mode == cudaStreamCaptureModeRelaxed)
        return false;
    if (pthread_equal(capture->thread, pthread_self()))
        return capture->mode != cudaStreamCaptureModeRelaxed;
    return capture->mode == cudaStreamCaptureModeGlobal && interaction_mode == cudaStreamCaptureModeGlobal;
}

/* A call that is unsafe during captures fails and invalidates those that prohibit it. */
cudaError_t unsafe_in_captures(void)
{
    cudaError_t error = cudaSuccess;
    for (struct capture *capture = newest_capture; capture; capture = capture->next)
        if (prohibits(capture)) {
            capture->failed = true;
            error = cudaErrorStreamCaptureUnsupported;
        }
    return error;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode)
{
    int previous = interaction_mode;
    interaction_mode = *mode;
    *mode = previous;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode)
{
    static atomic_ullong captures;
    struct capture *capture = malloc(sizeof *capture);
    *capture = (struct capture){.open = true, .mode = mode, .thread = pthread_self(), .id = ++captures};
    capture->next = newest_capture;
    while (!atomic_compare_exchange_weak(&newest_capture, &capture->next, capture))
        ;
    *capture_of(stream) = capture;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status)
{
    struct capture *capture = *capture_of(stream);
    *status = capture_open(capture) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

/* The name in libcuda, which Triton's launcher calls. */
CUresult cuStreamIsCapturing(cudaStream_t stream, int *status) { return cudaStreamIsCapturing(stream, status); }

/* A captured graph has no nodes to depend on; its handle only has to be unique. */
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, int *status, unsigned long long *id,
                                        cudaGraph_t *graph, const cudaGraphNode_t **dependencies, size_t *count)
{
    struct capture *capture = *capture_of(stream);
    cudaStreamIsCapturing(stream, status);
    if (id)
        *id = capture ? capture->id : 0;
    if (graph)
        *graph = (cudaGraph_t)capture;
    if (dependencies)
        *dependencies = NULL;
    if (count)
        *count = 0;
    return cudaSuccess;
}

/* The form of CUDA 13, in which edges carry data; CUDA 12 has it under the name below. */
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, const void **edges, size_t *count)
{
    if (edges)
        *edges = NULL;
    return cudaStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}

cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, int *status, unsigned long long *id,
                                        cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                        const void **edges, size_t *count)
{
    return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, edges, count);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    struct capture *capture = *capture_of(stream);
    if (!capture_open(capture))
        return record_error(cudaErrorInvalidValue);
    capture->open = false;
    *graph = capture->failed ? NULL : malloc(1);
    return record_error(capture->failed ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}

/* One node, because PyTorch warns about an empty graph. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    (void)graph;
    *count = 1;
    return nodes ? record_error(unsupported("cudaGraphGetNodes", cudaErrorNotSupported)) : cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                          unsigned long long flags)
{
    (void)graph, (void)flags;
    *executable = malloc(1);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    free(executable);
    return cudaSuccess;
}

WORK(cudaGraphLaunch)
