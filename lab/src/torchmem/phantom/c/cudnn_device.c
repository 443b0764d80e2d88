/* The GPU as cuDNN needs it described to build plans without a GPU ("deviceless", cuDNN 9.8). */
#include "cudnn.h"
#include "lacking.h"

#include <pthread.h>
#include <stdio.h>

/* Numbers of CUdevice_attribute. */
static const struct {
    const char *name;
    int attribute;
} properties[] = {
    {"regsPerBlock", 12}, {"multiProcessorCount", 16}, {"warpSize", 10}, {"maxSharedMemoryPerBlock", 8},
    {"maxSharedMemoryPerBlockOptin", 97}, {"reservedSharedMemoryPerBlock", 111}, {"maxRegistersPerSM", 82},
    {"maxCtasPerSM", 106}, {"maxThreadsPerBlock", 1}, {"maxThreadsPerSM", 39}, {"supportCoopLaunch", 95},
    {"smClockRateKHz", 13}, {"memClockRateKHz", 36}, {"l2CacheSize", 38},
};
enum { BLOCK_X = 2, GRID_X = 5, DEVICE_JSON = 2702 };

static int value_of(int attribute, int gpu)
{
    int value = 0;
    device_attribute(attribute, gpu, &value);
    return value;
}

static int describe(char *text, size_t room, int gpu)
{
    int n = snprintf(text, room, "{\"deviceName\":\"%s\",\"cudaDeviceId\":%d,\"deviceVer\":%d,\"driverVer\":%d",
                     model()->name, current_device(), model()->capability * 10, model()->cuda_version);
    n += snprintf(text + n, room - (size_t)n, ",\"totalGlobalMem\":%llu,\"isTccDriver\":0,\"pciDeviceId\":0",
                  (unsigned long long)gpu_bytes());
    const char *lists[] = {"maxBlockSize", "maxGridSize"};
    for (int list = 0, first = BLOCK_X; list < 2; list++, first = GRID_X)
        n += snprintf(text + n, room - (size_t)n, ",\"%s\":[%d,%d,%d]", lists[list], value_of(first, gpu),
                      value_of(first + 1, gpu), value_of(first + 2, gpu));
    for (size_t row = 0; row < sizeof properties / sizeof *properties; row++)
        n += snprintf(text + n, room - (size_t)n, ",\"%s\":%d", properties[row].name, value_of(properties[row].attribute, gpu));
    return n + snprintf(text + n, room - (size_t)n, "}");
}

int backend_create(int type, void **descriptor)
{
    return REAL(cudnnBackendCreateDescriptor, int, void **)(type, descriptor);
}

int backend_destroy(void *descriptor) { return REAL(cudnnBackendDestroyDescriptor, void *)(descriptor); }

int backend_finalize(void *descriptor) { return REAL(cudnnBackendFinalize, void *)(descriptor); }

int backend_set(void *descriptor, int name, int type, int64_t count, const void *values)
{
    return REAL(cudnnBackendSetAttribute, void *, int, int, int64_t, const void *)(descriptor, name, type, count,
                                                                                   values);
}

int backend_get(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values)
{
    return REAL(cudnnBackendGetAttribute, void *, int, int, int64_t, int64_t *, void *)(descriptor, name, type, room,
                                                                                        count, values);
}

static void *new_device(int gpu)
{
    char text[2048];
    void *device;
    int64_t length = describe(text, sizeof text, gpu);
    int error = backend_create(BACKEND_DEVICE, &device);
    error = error ? error : backend_set(device, DEVICE_JSON, BACKEND_CHAR, length, text);
    error = error ? error : backend_finalize(device);
    return error ? NULL : device;
}

static void *devices[MAX_GPUS];
static bool described[MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void *backend_device(void)
{
    int gpu = gpu_of(current_device());
    pthread_mutex_lock(&lock);
    if (!described[gpu] && workspaces() != ESTIMATED)
        devices[gpu] = new_device(gpu);
    described[gpu] = true;
    pthread_mutex_unlock(&lock);
    return devices[gpu];
}

/* cuDNN looks these calls up in libcuda.so.1 before it offers an engine that compiles its kernels.
 * Such an engine never runs here, so none of them is called. Weak: another file may define the call. */
LACKING(cuCtxGetLimit, 801)
LACKING(cuCtxPopCurrent, 801)
LACKING(cuCtxPushCurrent, 801)
LACKING(cuKernelGetAttribute, 801)
LACKING(cuKernelSetAttribute, 801)
LACKING(cuLaunchKernelEx, 801)
LACKING(cuLibraryGetKernel, 801)
LACKING(cuLibraryLoadData, 801)
LACKING(cuLibraryLoadFromFile, 801)
LACKING(cuLibraryUnload, 801)
LACKING(cuLinkAddData, 801)
LACKING(cuLinkCreate, 801)
LACKING(cuLinkDestroy, 801)
LACKING(cuOccupancyMaxPotentialClusterSize, 801)
LACKING(cuStreamGetCtx, 801)
