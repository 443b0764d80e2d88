/* Stands in for libcudart: the current device, errors, versions, driver calls by name. */
#define _GNU_SOURCE
#include "cudart.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static __thread cudaError_t last_error;
static __thread int device_of_thread;

cudaError_t record_error(cudaError_t error)
{
    if (error)
        last_error = error;
    return error;
}

cudaError_t enter(int device)
{
    if (device_count() == 0)
        return cudaErrorNoDevice;
    if (forked_with_context())
        return cudaErrorInitializationError;
    return open_context(gpu_of(device)) ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported by the phantom GPU"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
};

const char *cudaGetErrorName(cudaError_t error)
{
    for (size_t row = 0; row < sizeof errors / sizeof *errors; row++)
        if (errors[row].error == error)
            return errors[row].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (size_t row = 0; row < sizeof errors / sizeof *errors; row++)
        if (errors[row].error == error)
            return errors[row].text;
    return "unrecognized error code";
}

int current_device(void) { return device_of_thread; }

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = device_count();
    return record_error(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = device_of_thread;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (gpu_of(device) < 0)
        return record_error(cudaErrorInvalidDevice);
    device_of_thread = device;
    return record_error(enter(device));
}

cudaError_t cudaDeviceSynchronize(void) { return record_error(enter(device_of_thread)); }

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    (void)device, (void)peer;
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    char pci[16];
    gpu_pci_text(gpu_of(device), pci);
    snprintf(text, (size_t)length, "%s", pci);
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = model()->cuda_version;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

/* The newest version of a driver call that the phantom GPU has. */
void *driver_entry(const char *name)
{
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    void *entry = dlsym(RTLD_DEFAULT, newer);
    return entry ? entry : dlsym(RTLD_DEFAULT, name);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version,
                                             unsigned long long flags,
                                             int *status)
{
    (void)version, (void)flags;
    *entry = driver_entry(name);
    if (status)
        *status = *entry ? ENTRY_FOUND : ENTRY_NOT_FOUND;
    return cudaSuccess;
}

/* The form of CUDA 12. */
cudaError_t cudaGetDriverEntryPoint(const char *name, void **entry, unsigned long long flags, int *status)
{
    return cudaGetDriverEntryPointByVersion(name, entry, 0, flags, status);
}

SUCCEED(cudaProfilerStart)
SUCCEED(cudaProfilerStop)
