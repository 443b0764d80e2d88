/* The library itself, handles of GPUs and MIG devices, and their identity. */
#include "state.h"

#include <stdio.h>
#include <string.h>

NVML(InitWithFlags, unsigned flags)
{
    (void)flags;
    nvmlReturn_t code = answer("nvmlInitWithFlags", NULL, NULL, NULL);
    initialize(code ? 0 : 1);
    return code;
}

/* Called by old bindings. */
NVML(Init_v2, void) { return nvmlInitWithFlags(0); }

NVML(Shutdown, void)
{
    nvmlReturn_t code = answer("nvmlShutdown", NULL, NULL, NULL);
    initialize(code ? 0 : -1);
    return code;
}

const char *nvmlErrorString(nvmlReturn_t code);
const char *nvmlErrorString(nvmlReturn_t code) { return code ? "an error of the fake NVML" : "Success"; }

#define NODE_TEXT(name)                                                        \
    NVML(name, char *text, unsigned length)                                    \
    {                                                                          \
        return give_text("nvml" #name, NULL, #name, text, length);             \
    }

NODE_TEXT(SystemGetDriverVersion)
NODE_TEXT(SystemGetNVMLVersion)

static nvmlReturn_t cuda_version(const char *function, int *version)
{
    u64 found = 0;
    nvmlReturn_t code = numbers(function, NULL, "SystemGetCudaDriverVersion", 0, 1, &found);
    *version = (int)found;
    return code;
}

NVML(SystemGetCudaDriverVersion, int *version) { return cuda_version("nvmlSystemGetCudaDriverVersion", version); }
NVML(SystemGetCudaDriverVersion_v2, int *version)
{
    return cuda_version("nvmlSystemGetCudaDriverVersion_v2", version);
}

NVML(DeviceGetCount_v2, unsigned *count)
{
    *count = gpu_count();
    return answer("nvmlDeviceGetCount_v2", NULL, NULL, NULL);
}

static nvmlReturn_t give_handle(const char *function, nvmlDevice_t device, nvmlReturn_t absent, nvmlDevice_t *handle)
{
    nvmlReturn_t code = answer(function, device, NULL, NULL);
    *handle = device;
    return code ? code : device ? SUCCESS : absent;
}

NVML(DeviceGetHandleByIndex_v2, unsigned index, nvmlDevice_t *handle)
{
    char name[64];
    snprintf(name, sizeof name, "gpu %u", index);
    return give_handle("nvmlDeviceGetHandleByIndex_v2", device_named(name), INVALID_ARGUMENT, handle);
}

NVML(DeviceGetHandleByUUID, const char *uuid, nvmlDevice_t *handle)
{
    return give_handle("nvmlDeviceGetHandleByUUID", device_with_uuid(uuid), NOT_FOUND, handle);
}

#define DEVICE_TEXT(name)                                                              \
    NVML(DeviceGet##name, nvmlDevice_t device, char *text, unsigned length)            \
    {                                                                                  \
        return give_text("nvmlDeviceGet" #name, device, #name, text, length);          \
    }

DEVICE_TEXT(Name)
DEVICE_TEXT(UUID)
DEVICE_TEXT(VbiosVersion)

/* `PciInfo = 00000000:18:00.0` */
NVML(DeviceGetPciInfo_v3, nvmlDevice_t device, nvmlPciInfo_t *info)
{
    nvmlPciInfo_t found = {0};
    nvmlReturn_t code =
        give_text("nvmlDeviceGetPciInfo_v3", device, "PciInfo", found.bus_id, sizeof found.bus_id);
    sscanf(found.bus_id, "%x:%x:%x", &found.domain, &found.bus, &found.device);
    snprintf(found.bus_id_legacy, sizeof found.bus_id_legacy, "%.12s", strlen(found.bus_id) > 4 ? found.bus_id + 4 : "");
    if (!code)
        *info = found;
    return code;
}

NVML(DeviceGetMigDeviceHandleByIndex, nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    char parent[64], name[96], mode[MAX_TEXT];
    nvmlReturn_t code = answer("nvmlDeviceGetMigDeviceHandleByIndex", device, "MigMode", mode);
    if (code)
        return code;
    name_of(device, parent);
    snprintf(name, sizeof name, "mig %s/%u", strlen(parent) > 4 ? parent + 4 : "", index);
    *mig = device_named(name);
    return *mig ? SUCCESS : NOT_FOUND;
}

NVML(DeviceGetGpuInstanceById, nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance)
{
    char parent[64], name[96], mode[MAX_TEXT];
    nvmlReturn_t code = answer("nvmlDeviceGetGpuInstanceById", device, "MigMode", mode);
    if (code)
        return code;
    name_of(device, parent);
    for (unsigned index = 0; index < 8; index++) {
        u64 found[1] = {0};
        snprintf(name, sizeof name, "mig %s/%u", strlen(parent) > 4 ? parent + 4 : "", index);
        *instance = device_named(name);
        if (*instance && !numbers("nvmlDeviceGetGpuInstanceId", *instance, "GpuInstanceId", 0, 1, found) && found[0] == id)
            return SUCCESS;
    }
    return NOT_FOUND;
}

/* `GpuInstanceInfo = PROFILE START` of a MIG device */
NVML(GpuInstanceGetInfo, nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    u64 found[2] = {0};
    nvmlReturn_t code = numbers("nvmlGpuInstanceGetInfo", instance, "GpuInstanceInfo", 0, 2, found);
    if (!code)
        *info = (nvmlGpuInstanceInfo_t){.profile_id = (unsigned)found[0], .start = (unsigned)found[1]};
    return code;
}
