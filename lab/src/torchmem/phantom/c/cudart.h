/* Declarations shared by the files that stand in for libcudart and libcuda. */
#pragma once

#include "cuda_abi.h"
#include "phantom.h"

#include <stdlib.h>

/* Stores an error for cudaGetLastError and returns it. */
cudaError_t record_error(cudaError_t error);
/* Opens the device's context. Returns the error that CUDA returns if that fails. */
cudaError_t enter(int device);

/* cudart_graph.c: the capture that a stream or an event belongs to, or NULL. */
struct capture;
bool capture_open(const struct capture *capture);
cudaError_t wait_in_capture(struct capture *capture);
cudaError_t unsafe_in_captures(void);
/* cudart_stream.c */
struct capture **capture_of(cudaStream_t stream);

cudaError_t cudaSetDevice(int device);
cudaError_t cudaDriverGetVersion(int *version);
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                   int block_size, size_t shared_bytes,
                                                                   unsigned flags);

/* A call without an effect on memory or on the host succeeds. Its arguments are ignored, which C
 * calling conventions allow. */
#define SUCCEED(name) \
    int name(void);   \
    int name(void) { return cudaSuccess; }

/* A library's object of which the phantom keeps nothing but its address. */
#define HANDLE(create, destroy) \
    int create(void **handle)   \
    {                           \
        *handle = calloc(1, 1); \
        return 0;               \
    }                           \
    int destroy(void *handle)   \
    {                           \
        free(handle);           \
        return 0;               \
    }
