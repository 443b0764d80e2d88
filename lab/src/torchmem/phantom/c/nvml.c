/* Stands in for libnvidia-ml.so.1: the properties of the phantom GPUs, and "not supported" for
 * all others. */
#include "phantom.h"

#include <stdio.h>
#include <string.h>

/* Return values and structures of nvml.h and of the pynvml module of nvidia-ml-py. */
enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
};

typedef int nvmlReturn_t;
typedef char *nvmlDevice_t; /* the address of a GPU's entry in `handles` */

struct nvmlMemory_v1 {
    unsigned long long total, free, used;
};
struct nvmlMemory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct nvmlProcessInfo_v1 {
    unsigned pid;
    unsigned long long usedGpuMemory;
};
struct nvmlProcessInfo_v2 {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
};
struct nvmlPciInfo {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
};
/* The start of nvmlGpuFabricInfo_v2_t; the rest is not written. */
struct nvmlGpuFabricInfo {
    unsigned version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state;
};

static char handles[MAX_GPUS];
static _Atomic int initialisations;

#define NVML(name, ...)                   \
    nvmlReturn_t nvml##name(__VA_ARGS__); \
    nvmlReturn_t nvml##name(__VA_ARGS__)

static nvmlReturn_t gpu_of_handle(nvmlDevice_t handle, int *gpu)
{
    if (!initialisations)
        return NVML_ERROR_UNINITIALIZED;
    if (handle < handles || handle >= handles + gpu_count())
        return NVML_ERROR_INVALID_ARGUMENT;
    *gpu = (int)(handle - handles);
    return NVML_SUCCESS;
}

static nvmlReturn_t give_text(char *text, unsigned length, const char *value)
{
    if (strlen(value) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(text, value);
    return NVML_SUCCESS;
}

NVML(Init_v2, void)
{
    initialisations++;
    return NVML_SUCCESS;
}

/* The first version, which torch.cuda still calls. */
NVML(Init, void) { return nvmlInit_v2(); }

NVML(InitWithFlags, unsigned flags)
{
    (void)flags;
    return nvmlInit_v2();
}

NVML(Shutdown, void)
{
    if (!initialisations)
        return NVML_ERROR_UNINITIALIZED;
    initialisations--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t error);
const char *nvmlErrorString(nvmlReturn_t error)
{
    static const char *texts[] = {"Success",
                                  "Uninitialized",
                                  "Invalid Argument",
                                  "Not Supported",
                                  "Insufficient Permissions",
                                  "Already Initialized",
                                  "Not Found",
                                  "Insufficient Size"};
    return error >= 0 && error < 8 ? texts[error] : "Unknown Error";
}

NVML(SystemGetDriverVersion, char *text, unsigned length)
{
    return give_text(text, length, DRIVER_VERSION);
}

NVML(SystemGetNVMLVersion, char *text, unsigned length)
{
    return give_text(text, length, "13." DRIVER_VERSION);
}

NVML(SystemGetCudaDriverVersion_v2, int *version)
{
    *version = model()->cuda_version;
    return NVML_SUCCESS;
}

NVML(DeviceGetCount_v2, unsigned *count)
{
    *count = (unsigned)gpu_count();
    return initialisations ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

NVML(DeviceGetHandleByIndex_v2, unsigned index, nvmlDevice_t *handle)
{
    *handle = &handles[index % MAX_GPUS];
    if (!initialisations)
        return NVML_ERROR_UNINITIALIZED;
    return index < (unsigned)gpu_count() ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

NVML(DeviceGetHandleByUUID, const char *uuid, nvmlDevice_t *handle)
{
    int gpu = gpu_with_uuid(uuid);
    if (gpu < 0)
        return initialisations ? NVML_ERROR_NOT_FOUND : NVML_ERROR_UNINITIALIZED;
    return nvmlDeviceGetHandleByIndex_v2((unsigned)gpu, handle);
}

/* CUDA writes the PCI domain with four digits, NVML with eight: "00000000:01:00.0". */
NVML(DeviceGetHandleByPciBusId_v2, const char *text, nvmlDevice_t *handle)
{
    unsigned domain, bus;
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2 || domain != 0 || bus < 1 || bus > (unsigned)gpu_count())
        return initialisations ? NVML_ERROR_NOT_FOUND : NVML_ERROR_UNINITIALIZED;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle);
}

NVML(DeviceGetIndex, nvmlDevice_t handle, unsigned *index)
{
    int gpu = 0;
    nvmlReturn_t error = gpu_of_handle(handle, &gpu);
    *index = (unsigned)gpu;
    return error;
}

NVML(DeviceGetMinorNumber, nvmlDevice_t handle, unsigned *number)
{
    return nvmlDeviceGetIndex(handle, number);
}

NVML(DeviceGetName, nvmlDevice_t handle, char *text, unsigned length)
{
    int gpu;
    nvmlReturn_t error = gpu_of_handle(handle, &gpu);
    return error ? error : give_text(text, length, model()->name);
}

NVML(DeviceGetUUID, nvmlDevice_t handle, char *text, unsigned length)
{
    char uuid[48];
    int gpu = 0;
    nvmlReturn_t error = gpu_of_handle(handle, &gpu);
    gpu_uuid_text(gpu, uuid);
    return error ? error : give_text(text, length, uuid);
}

NVML(DeviceGetPciInfo_v3, nvmlDevice_t handle, struct nvmlPciInfo *info)
{
    int gpu = 0;
    nvmlReturn_t error = gpu_of_handle(handle, &gpu);
    *info = (struct nvmlPciInfo){.bus = (unsigned)gpu + 1};
    gpu_pci_text(gpu, info->busIdLegacy);
    snprintf(info->busId, sizeof info->busId, "0000%s", info->busIdLegacy);
    return error;
}

NVML(DeviceGetCudaComputeCapability, nvmlDevice_t handle, int *major, int *minor)
{
    int gpu;
    *major = model()->capability / 10;
    *minor = model()->capability % 10;
    return gpu_of_handle(handle, &gpu);
}

NVML(DeviceGetMemoryInfo, nvmlDevice_t handle, struct nvmlMemory_v1 *memory)
{
    int gpu = 0;
    nvmlReturn_t error = gpu_of_handle(handle, &gpu);
    if (error)
        return error;
    memory->total = gpu_bytes();
    memory->free = gpu_free_bytes(gpu);
    memory->used = memory->total - memory->free;
    return NVML_SUCCESS;
}

/* Nothing is reserved: a phantom driver keeps no memory for itself. */
NVML(DeviceGetMemoryInfo_v2, nvmlDevice_t handle, struct nvmlMemory_v2 *memory)
{
    struct nvmlMemory_v1 plain;
    nvmlReturn_t error = nvmlDeviceGetMemoryInfo(handle, &plain);
    if (error)
        return error;
    memory->total = plain.total;
    memory->free = plain.free;
    memory->used = plain.used;
    memory->reserved = 0;
    return NVML_SUCCESS;
}

static nvmlReturn_t list_processes(nvmlDevice_t handle, unsigned *room, struct process_memory *list,
                                   unsigned most)
{
    int gpu = 0;
    nvmlReturn_t error = gpu_of_handle(handle, &gpu);
    if (error)
        return error;
    unsigned wanted = *room;
    *room = (unsigned)processes_on(gpu, list, (int)(wanted < most ? wanted : most));
    return *room > wanted ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

NVML(DeviceGetComputeRunningProcesses_v3, nvmlDevice_t handle, unsigned *count,
     struct nvmlProcessInfo_v2 *infos)
{
    struct process_memory list[256];
    nvmlReturn_t error = list_processes(handle, count, list, 256);
    for (unsigned row = 0; !error && row < *count; row++)
        infos[row] = (struct nvmlProcessInfo_v2){.pid = (unsigned)list[row].pid,
                                                 .usedGpuMemory = list[row].bytes,
                                                 .gpuInstanceId = ~0u,
                                                 .computeInstanceId = ~0u};
    return error;
}

/* The first version, which PyTorch calls for its out-of-memory message. */
NVML(DeviceGetComputeRunningProcesses, nvmlDevice_t handle, unsigned *count, struct nvmlProcessInfo_v1 *infos)
{
    struct process_memory list[256];
    nvmlReturn_t error = list_processes(handle, count, list, 256);
    for (unsigned row = 0; !error && row < *count; row++)
        infos[row] =
            (struct nvmlProcessInfo_v1){.pid = (unsigned)list[row].pid, .usedGpuMemory = list[row].bytes};
    return error;
}

NVML(DeviceGetGraphicsRunningProcesses_v3, nvmlDevice_t handle, unsigned *count,
     struct nvmlProcessInfo_v2 *infos)
{
    int gpu;
    (void)infos;
    *count = 0;
    return gpu_of_handle(handle, &gpu);
}

/* PyTorch calls this before it maps memory for expandable segments. State 0: no NVLink fabric
 * between machines. */
NVML(DeviceGetGpuFabricInfoV, nvmlDevice_t handle, struct nvmlGpuFabricInfo *info)
{
    int gpu;
    info->status = NVML_ERROR_NOT_SUPPORTED;
    info->state = 0;
    return gpu_of_handle(handle, &gpu);
}

#define NOT_SUPPORTED(name) \
    NVML(name, void) { return NVML_ERROR_NOT_SUPPORTED; }

NOT_SUPPORTED(DeviceGetPowerUsage)
NOT_SUPPORTED(DeviceGetEnforcedPowerLimit)
NOT_SUPPORTED(DeviceGetTotalEnergyConsumption)
NOT_SUPPORTED(DeviceGetTemperature)
NOT_SUPPORTED(DeviceGetTemperatureV)
NOT_SUPPORTED(DeviceGetTemperatureThreshold)
NOT_SUPPORTED(DeviceGetUtilizationRates)
NOT_SUPPORTED(DeviceGetClockInfo)
NOT_SUPPORTED(DeviceGetMaxClockInfo)
NOT_SUPPORTED(DeviceGetCurrentClocksEventReasons)
NOT_SUPPORTED(DeviceGetCurrentClocksThrottleReasons)
NOT_SUPPORTED(DeviceGetFanSpeed)
NOT_SUPPORTED(DeviceGetPerformanceState)
NOT_SUPPORTED(DeviceGetFieldValues)
NOT_SUPPORTED(DeviceGetTotalEccErrors)
NOT_SUPPORTED(DeviceGetMemoryErrorCounter)
NOT_SUPPORTED(DeviceGetRemappedRows)
NOT_SUPPORTED(DeviceGetPcieThroughput)
NOT_SUPPORTED(DeviceGetPcieReplayCounter)
NOT_SUPPORTED(DeviceGetCurrPcieLinkGeneration)
NOT_SUPPORTED(DeviceGetCurrPcieLinkWidth)
NOT_SUPPORTED(DeviceGetNvLinkState)
NOT_SUPPORTED(DeviceGetNvLinkErrorCounter)
NOT_SUPPORTED(DeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(DeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(DeviceGetMigMode)
NOT_SUPPORTED(DeviceGetMaxMigDeviceCount)
NOT_SUPPORTED(DeviceGetMigDeviceHandleByIndex)
NOT_SUPPORTED(DeviceGetSupportedEventTypes)
NOT_SUPPORTED(DeviceRegisterEvents)
NOT_SUPPORTED(DeviceGetProcessUtilization)
NOT_SUPPORTED(EventSetCreate)
NOT_SUPPORTED(SystemGetProcessName)
