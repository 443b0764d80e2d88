/* What the files that stand in for libcudart and libcuda share. */
#pragma once

#include "cuda_abi.h"
#include "phantom.h"

/* Remembers an error for cudaGetLastError and hands it on. */
cudaError_t answer(cudaError_t error);
/* Opens the device's context; the error CUDA gives where it cannot. */
cudaError_t enter(int device);

/* cudart_graph.c: the capture that a stream or an event takes part in, NULL for none. */
struct capture;
bool capture_open(const struct capture *capture);
cudaError_t wait_in_capture(struct capture *capture);
/* cudart_stream.c */
struct capture **capture_of(cudaStream_t stream);

cudaError_t cudaSetDevice(int device);
cudaError_t cudaDriverGetVersion(int *version);
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                   int block_size, size_t shared_bytes,
                                                                   unsigned flags);

/* A call without effect on memory or on the host succeeds. Its arguments are not looked at, which the calling
 * conventions of C allow. */
#define SUCCEED(name) \
    int name(void);   \
    int name(void) { return cudaSuccess; }
