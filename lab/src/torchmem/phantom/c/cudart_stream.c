/* Stands in for libcudart: streams and events. Work takes no time, so all of it is done. */
#include "cudart.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

struct CUstream_st {
    int priority;
    struct capture *capture;
};

struct CUevent_st {
    struct timespec recorded;
    struct capture *capture;
};

static atomic_bool held;

/* For tests, through ctypes: until released, all events and streams report that work is pending. */
void phantom_hold_events(int hold) { held = hold; }

static struct CUstream_st *stream_of(cudaStream_t stream)
{
    static struct CUstream_st legacy, per_thread;
    return stream == NULL || stream == cudaStreamLegacy ? &legacy
           : stream == cudaStreamPerThread              ? &per_thread
                                                        : stream;
}

struct capture **capture_of(cudaStream_t stream) { return &stream_of(stream)->capture; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    (void)flags;
    cudaError_t error = enter(current_device());
    if (error)
        return record_error(error);
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
    cudaError_t error = wait_in_capture(*capture_of(stream));
    return record_error(error ? error : held ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return record_error(wait_in_capture(*capture_of(stream))); }

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
    return record_error(error);
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
    return record_error(held ? cudaErrorNotReady : cudaSuccess);
}

SUCCEED(cudaEventSynchronize)

/* Host time between the two records, in milliseconds; kernels take no time. */
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
    if (capture_open(event->capture))
        stream_of(stream)->capture = event->capture;
    return cudaSuccess;
}
