/* The part of NVML that the exporter uses, declared anew: names, sizes and codes as in the pynvml module of
 * nvidia-ml-py, against which tests/exporter/test_fake_nvml.py checks them. */
#pragma once

#include <stddef.h>

typedef int nvmlReturn_t;
typedef unsigned long long u64;
typedef struct device *nvmlDevice_t;
typedef struct event_set *nvmlEventSet_t;
typedef nvmlDevice_t nvmlGpuInstance_t; /* the first MIG device on it */
typedef struct gpm_sample *nvmlGpmSample_t;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
};

typedef struct {
    nvmlDevice_t device;
    unsigned id, profile_id, start, size;
} nvmlGpuInstanceInfo_t;
typedef struct {
    u64 total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    u64 total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    u64 total, free, used;
} nvmlBAR1Memory_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned version, sensor;
    int degrees;
} nvmlTemperature_v1_t;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned pid;
    u64 used;
} nvmlProcessInfo_v1_t;

/* Versions 2 and 3 of the functions fill the same structure. */
typedef struct {
    unsigned pid;
    u64 used;
    unsigned gpu_instance, compute_instance;
} nvmlProcessInfo_v2_t;

typedef struct {
    unsigned pid;
    u64 timestamp;
    unsigned sm, memory, encoder, decoder;
} nvmlProcessUtilizationSample_t;

typedef union {
    double number;
    unsigned uint;
    u64 ull;
    long long sll;
} nvmlValue_t;

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type;
    nvmlReturn_t result;
    nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct {
    nvmlDevice_t device;
    u64 type, data;
    unsigned gpu_instance, compute_instance;
} nvmlEventData_t;

typedef struct {
    unsigned version, supported;
} nvmlGpmSupport_t;

typedef struct {
    unsigned id;
    nvmlReturn_t result;
    double value;
    const char *short_name, *long_name, *unit;
} nvmlGpmMetric_t;

/* The binding's array has a place for each of its metrics; nothing past `count` is used. */
typedef struct {
    unsigned version, count;
    nvmlGpmSample_t first, second;
    nvmlGpmMetric_t metrics[];
} nvmlGpmMetricsGet_t;

#define NVML(name, ...)                   \
    nvmlReturn_t nvml##name(__VA_ARGS__); \
    nvmlReturn_t nvml##name(__VA_ARGS__)
