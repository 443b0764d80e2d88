/* Functions that fill the caller's array: processes, their utilization, field values. */
#include "state.h"

#include <stdio.h>
#include <string.h>

static unsigned length_of(const char *text)
{
    u64 fields[MAX_ROW];
    unsigned count, length = 0;
    while (row(text, length, fields, &count))
        length++;
    return length;
}

/* Read the list and return its length; INSUFFICIENT_SIZE without room, as the caller's first call expects. */
static nvmlReturn_t list(const char *function, nvmlDevice_t device, const char *key, char text[MAX_TEXT],
                         unsigned *room)
{
    nvmlReturn_t code = answer(function, device, key, text);
    if (code)
        return code;
    unsigned offered = *room;
    *room = length_of(text);
    return *room > offered ? INSUFFICIENT_SIZE : SUCCESS;
}

/* `ComputeRunningProcesses = PID:BYTES[:GPU_INSTANCE:COMPUTE_INSTANCE] ...`, `-` for bytes that are not known */
static nvmlReturn_t processes(const char *function, nvmlDevice_t device, const char *key, unsigned *room, void *rows,
                              int is_first_version)
{
    char text[MAX_TEXT];
    nvmlReturn_t code = list(function, device, key, text, room);
    for (unsigned place = 0; !code && place < *room; place++) {
        u64 field[MAX_ROW] = {0, 0, ~0u, ~0u};
        unsigned count;
        row(text, place, field, &count);
        if (is_first_version)
            ((nvmlProcessInfo_v1_t *)rows)[place] = (nvmlProcessInfo_v1_t){(unsigned)field[0], field[1]};
        else
            ((nvmlProcessInfo_v2_t *)rows)[place] =
                (nvmlProcessInfo_v2_t){(unsigned)field[0], field[1], (unsigned)field[2], (unsigned)field[3]};
    }
    return code;
}

#define PROCESSES(function, key, is_first_version)                                                  \
    NVML(function, nvmlDevice_t device, unsigned *room, void *rows)                                 \
    {                                                                                               \
        return processes("nvml" #function, device, key, room, rows, is_first_version);              \
    }

PROCESSES(DeviceGetComputeRunningProcesses, "ComputeRunningProcesses", 1)
PROCESSES(DeviceGetComputeRunningProcesses_v2, "ComputeRunningProcesses", 0)
PROCESSES(DeviceGetComputeRunningProcesses_v3, "ComputeRunningProcesses", 0)
PROCESSES(DeviceGetGraphicsRunningProcesses, "GraphicsRunningProcesses", 1)
PROCESSES(DeviceGetGraphicsRunningProcesses_v2, "GraphicsRunningProcesses", 0)
PROCESSES(DeviceGetGraphicsRunningProcesses_v3, "GraphicsRunningProcesses", 0)
PROCESSES(DeviceGetMPSComputeRunningProcesses, "MPSComputeRunningProcesses", 1)
PROCESSES(DeviceGetMPSComputeRunningProcesses_v2, "MPSComputeRunningProcesses", 0)
PROCESSES(DeviceGetMPSComputeRunningProcesses_v3, "MPSComputeRunningProcesses", 0)

/* `ProcessUtilization = PID:MICROSECONDS:SM:MEMORY:ENCODER:DECODER ...`, `now` for the time of the call. Returns
 * only newer samples, and "not found" without any, as the driver does. */
NVML(DeviceGetProcessUtilization, nvmlDevice_t device, nvmlProcessUtilizationSample_t *rows, unsigned *room, u64 since)
{
    char text[MAX_TEXT];
    nvmlReturn_t code = answer("nvmlDeviceGetProcessUtilization", device, "ProcessUtilization", text);
    unsigned found = 0, offered = *room, count;
    u64 f[MAX_ROW] = {0};
    for (unsigned place = 0; !code && row(text, place, f, &count); place++)
        if (f[1] > since && found++ < offered && rows)
            rows[found - 1] = (nvmlProcessUtilizationSample_t){
                (unsigned)f[0], f[1], (unsigned)f[2], (unsigned)f[3], (unsigned)f[4], (unsigned)f[5]};
    *room = found;
    if (code)
        return code;
    return !found ? NOT_FOUND : found > offered || !rows ? INSUFFICIENT_SIZE : SUCCESS;
}

/* `FieldValue.ID = uint 70`, with a scope `FieldValue.ID.SCOPE` or, for the sum over all links, `FieldValue.ID.all`:
 * the type determines the member of the union. */
static void give_value(const char *text, nvmlFieldValue_t *given)
{
    static const char *types[] = {"double", "uint", "ulong", "ull", "sll", "int", "ushort"}; /* nvmlValueType_t */
    char type[16] = "";
    double number = 0;
    sscanf(text, "%15s %lf", type, &number);
    for (unsigned i = 0; i < sizeof types / sizeof *types; i++)
        if (!strcmp(type, types[i]))
            given->type = i;
    given->value.ull = 0;
    if (given->type == 0)
        given->value.number = number;
    else
        sscanf(text, "%*s %llu", &given->value.ull);
}

NVML(DeviceGetFieldValues, nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    nvmlReturn_t code = answer("nvmlDeviceGetFieldValues", device, NULL, NULL);
    for (int i = 0; !code && i < count; i++) {
        char key[64], text[MAX_TEXT];
        const char *format = values[i].scope == ~0u ? "FieldValue.%u.all" : "FieldValue.%u.%u";
        snprintf(key, sizeof key, values[i].scope ? format : "FieldValue.%u", values[i].field, values[i].scope);
        values[i].result = answer("nvmlDeviceGetFieldValues", device, key, text);
        if (!values[i].result)
            give_value(text, &values[i]);
    }
    return code;
}
