/* Stands in for libcudart: streams, events, graph capture. Work takes no time: all of it is done. */
#include "cudart.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

struct capture {
    bool open;
    unsigned long long id;
};

struct CUstream_st {
    int priority;
    struct capture *capture;
};

struct CUevent_st {
    struct timespec recorded;
    struct capture *capture;
};

static atomic_bool held;

/* For tests, through ctypes: until released, every event and stream answers that its work is not done yet. */
void phantom_hold_events(int hold) { held = hold; }

static struct CUstream_st *stream_of(cudaStream_t stream)
{
    static struct CUstream_st legacy, per_thread;
    return stream == NULL || stream == cudaStreamLegacy ? &legacy
           : stream == cudaStreamPerThread              ? &per_thread
                                                        : stream;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    (void)flags;
    cudaError_t error = enter(current_device());
    if (error)
        return answer(error);
    *stream = calloc(1, sizeof **stream);
    (*stream)->priority = priority;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    (void)stream;
    return answer(held ? cudaErrorNotReady : cudaSuccess);
}

SUCCEED(cudaStreamSynchronize)

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data)
{
    (void)stream;
    call(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags)
{
    (void)flags;
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    (void)flags;
    cudaError_t error = enter(current_device());
    if (!error)
        *event = calloc(1, sizeof **event);
    return answer(error);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    (void)flags;
    clock_gettime(CLOCK_MONOTONIC, &event->recorded);
    event->capture = stream_of(stream)->capture;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    (void)event;
    return answer(held ? cudaErrorNotReady : cudaSuccess);
}

SUCCEED(cudaEventSynchronize)

/* The host's time between the two records, in milliseconds: kernels add nothing to it. */
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    double seconds = (double)(end->recorded.tv_sec - start->recorded.tv_sec);
    *milliseconds = (float)(seconds * 1e3 + (double)(end->recorded.tv_nsec - start->recorded.tv_nsec) / 1e6);
    return cudaSuccess;
}

/* A stream that waits for an event of a capture joins that capture. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    if (event->capture && event->capture->open)
        stream_of(stream)->capture = event->capture;
    return cudaSuccess;
}

/* A capture is never freed: streams and events may name it for as long as they live. */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    static atomic_ullong captures;
    (void)mode;
    struct capture *capture = malloc(sizeof *capture);
    *capture = (struct capture){.open = true, .id = ++captures};
    stream_of(stream)->capture = capture;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    struct capture *capture = stream_of(stream)->capture;
    *status = capture && capture->open ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

/* A captured graph has no nodes to depend on; its handle only has to be its own. CUDA 12 knows no edges. */
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
#if CUDART_VERSION >= 13000
                                     const cudaGraphEdgeData **edges,
#endif
                                     size_t *count)
{
    struct capture *capture = stream_of(stream)->capture;
    cudaStreamIsCapturing(stream, status);
    if (id)
        *id = capture ? capture->id : 0;
    if (graph)
        *graph = (cudaGraph_t)capture;
    if (dependencies)
        *dependencies = NULL;
#if CUDART_VERSION >= 13000
    if (edges)
        *edges = NULL;
#endif
    if (count)
        *count = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    struct capture *capture = stream_of(stream)->capture;
    if (!capture || !capture->open)
        return answer(cudaErrorInvalidValue);
    capture->open = false;
    *graph = malloc(1);
    return cudaSuccess;
}

/* One node: PyTorch warns about a graph that has none. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    (void)graph;
    *count = 1;
    return nodes ? answer(unsupported("cudaGraphGetNodes", cudaErrorNotSupported)) : cudaSuccess;
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

SUCCEED(cudaGraphLaunch)
SUCCEED(cudaThreadExchangeStreamCaptureMode)
