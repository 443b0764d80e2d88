/* Functions that return numbers: a line for each, with the state file's key and the kind of arguments. */
#include "state.h"

#include <stdio.h>

#define ASK(function, key, first, count) numbers("nvml" #function, device, key, first, count, found)

/* (device, unsigned *) */
#define ONE(function, key)                              \
    NVML(function, nvmlDevice_t device, unsigned *value) \
    {                                                   \
        u64 found[1] = {0};                             \
        nvmlReturn_t code = ASK(function, key, 0, 1);   \
        *value = (unsigned)found[0];                    \
        return code;                                    \
    }

/* (device, unsigned *, unsigned *) */
#define TWO(function, key)                                                 \
    NVML(function, nvmlDevice_t device, unsigned *first, unsigned *second) \
    {                                                                      \
        u64 found[2] = {0};                                                \
        nvmlReturn_t code = ASK(function, key, 0, 2);                      \
        *first = (unsigned)found[0], *second = (unsigned)found[1];         \
        return code;                                                       \
    }

/* (device, unsigned long long *) */
#define LONG(function, key)                            \
    NVML(function, nvmlDevice_t device, u64 *value)    \
    {                                                  \
        return numbers("nvml" #function, device, key, 0, 1, value); \
    }

/* (device, which, unsigned *): the list's place is the argument */
#define BY_PLACE(function, key)                                         \
    NVML(function, nvmlDevice_t device, unsigned place, unsigned *value) \
    {                                                                   \
        u64 found[1] = {0};                                             \
        nvmlReturn_t code = ASK(function, key, place, 1);               \
        *value = (unsigned)found[0];                                    \
        return code;                                                    \
    }

/* (device, which, kind, unsigned long long *): a list for each kind, `key.kind` */
#define BY_KIND(function, key)                                                    \
    NVML(function, nvmlDevice_t device, unsigned place, unsigned kind, u64 *value) \
    {                                                                             \
        char name[64];                                                            \
        snprintf(name, sizeof name, key ".%u", kind);                             \
        return numbers("nvml" #function, device, name, place, 1, value);          \
    }

ONE(DeviceGetPowerUsage, "PowerUsage")
ONE(DeviceGetEnforcedPowerLimit, "EnforcedPowerLimit")
ONE(DeviceGetPerformanceState, "PerformanceState")
ONE(DeviceGetFanSpeed, "FanSpeed")
ONE(DeviceGetNumFans, "NumFans")
ONE(DeviceGetCurrPcieLinkGeneration, "CurrPcieLinkGeneration")
ONE(DeviceGetMaxPcieLinkGeneration, "MaxPcieLinkGeneration")
ONE(DeviceGetCurrPcieLinkWidth, "CurrPcieLinkWidth")
ONE(DeviceGetMaxPcieLinkWidth, "MaxPcieLinkWidth")
ONE(DeviceGetPcieReplayCounter, "PcieReplayCounter")
ONE(DeviceGetMaxMigDeviceCount, "MaxMigDeviceCount")
ONE(DeviceGetGpuInstanceId, "GpuInstanceId")
ONE(DeviceGetComputeInstanceId, "ComputeInstanceId")
ONE(DeviceGetComputeMode, "ComputeMode")
ONE(DeviceGetPersistenceMode, "PersistenceMode")
TWO(DeviceGetEncoderUtilization, "EncoderUtilization")
TWO(DeviceGetDecoderUtilization, "DecoderUtilization")
TWO(DeviceGetJpgUtilization, "JpgUtilization")
TWO(DeviceGetOfaUtilization, "OfaUtilization")
TWO(DeviceGetPowerManagementLimitConstraints, "PowerManagementLimitConstraints")
TWO(DeviceGetEccMode, "EccMode")
TWO(DeviceGetMigMode, "MigMode")
LONG(DeviceGetTotalEnergyConsumption, "TotalEnergyConsumption")
LONG(DeviceGetCurrentClocksEventReasons, "CurrentClocksEventReasons")
LONG(DeviceGetCurrentClocksThrottleReasons, "CurrentClocksEventReasons")
LONG(DeviceGetSupportedEventTypes, "SupportedEventTypes")
BY_PLACE(DeviceGetTemperature, "Temperature")
BY_PLACE(DeviceGetTemperatureThreshold, "TemperatureThreshold")
BY_PLACE(DeviceGetClockInfo, "ClockInfo")
BY_PLACE(DeviceGetMaxClockInfo, "MaxClockInfo")
BY_PLACE(DeviceGetFanSpeed_v2, "FanSpeed_v2")
BY_PLACE(DeviceGetPcieThroughput, "PcieThroughput")
BY_PLACE(DeviceGetNvLinkState, "NvLinkState")
BY_KIND(DeviceGetNvLinkErrorCounter, "NvLinkErrorCounter")
BY_KIND(DeviceGetTotalEccErrors, "TotalEccErrors")

NVML(DeviceGetTemperatureV, nvmlDevice_t device, nvmlTemperature_v1_t *info)
{
    u64 found[1] = {0};
    nvmlReturn_t code = ASK(DeviceGetTemperatureV, "Temperature", info->sensor, 1);
    info->degrees = (int)found[0];
    return code;
}

NVML(DeviceGetRemappedRows, nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
     unsigned *failed)
{
    u64 found[4] = {0};
    nvmlReturn_t code = ASK(DeviceGetRemappedRows, "RemappedRows", 0, 4);
    *correctable = (unsigned)found[0], *uncorrectable = (unsigned)found[1];
    *pending = (unsigned)found[2], *failed = (unsigned)found[3];
    return code;
}

/* `MemoryInfo = total reserved free used`; version 1 of the function includes the reserved bytes in used. */
NVML(DeviceGetMemoryInfo, nvmlDevice_t device, nvmlMemory_t *memory)
{
    u64 found[4] = {0};
    nvmlReturn_t code = ASK(DeviceGetMemoryInfo, "MemoryInfo", 0, 4);
    *memory = (nvmlMemory_t){.total = found[0], .free = found[2], .used = found[1] + found[3]};
    return code;
}

NVML(DeviceGetMemoryInfo_v2, nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    u64 found[4] = {0};
    nvmlReturn_t code = ASK(DeviceGetMemoryInfo_v2, "MemoryInfo", 0, 4);
    if (memory->version != (2u << 24 | sizeof *memory))
        return ARGUMENT_VERSION_MISMATCH;
    *memory = (nvmlMemory_v2_t){memory->version, found[0], found[1], found[2], found[3]};
    return code;
}

/* `BAR1MemoryInfo = total free used` */
NVML(DeviceGetBAR1MemoryInfo, nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    return numbers("nvmlDeviceGetBAR1MemoryInfo", device, "BAR1MemoryInfo", 0, 3, &memory->total);
}

NVML(DeviceGetUtilizationRates, nvmlDevice_t device, nvmlUtilization_t *rates)
{
    u64 found[2] = {0};
    nvmlReturn_t code = ASK(DeviceGetUtilizationRates, "UtilizationRates", 0, 2);
    *rates = (nvmlUtilization_t){(unsigned)found[0], (unsigned)found[1]};
    return code;
}
