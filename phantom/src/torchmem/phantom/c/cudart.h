/* What the CUDA files share. NVIDIA's header is included so that the compiler checks every signature. */
#pragma once

#include "phantom.h"

#include <cuda_runtime_api.h>

/* Remembers an error for cudaGetLastError and hands it on. */
cudaError_t answer(cudaError_t error);
/* Opens the device's context; the error CUDA gives where it cannot. */
cudaError_t enter(int device);

/* A call without effect on memory or on the host succeeds. Its arguments are not looked at, which the calling
 * conventions of C allow; the second name hides it from the header's own declaration. */
#define SUCCEED(name)                        \
    int phantom_##name(void) __asm__(#name); \
    int phantom_##name(void) { return 0; }
