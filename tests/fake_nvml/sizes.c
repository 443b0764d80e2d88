/* How large each structure is here, for the test that compares them with the Python binding's. */
#include "nvml.h"

#include <string.h>

#define STRUCTURE(name, size) {#name, size}

static const struct {
    const char *name;
    size_t size;
} sizes[] = {
    STRUCTURE(nvmlMemory_t, sizeof(nvmlMemory_t)),
    STRUCTURE(nvmlMemory_v2_t, sizeof(nvmlMemory_v2_t)),
    STRUCTURE(nvmlBAR1Memory_t, sizeof(nvmlBAR1Memory_t)),
    STRUCTURE(nvmlUtilization_t, sizeof(nvmlUtilization_t)),
    STRUCTURE(nvmlTemperature_v1_t, sizeof(nvmlTemperature_v1_t)),
    STRUCTURE(nvmlPciInfo_t, sizeof(nvmlPciInfo_t)),
    STRUCTURE(nvmlProcessInfo_v2_t, sizeof(nvmlProcessInfo_v2_t)),
    STRUCTURE(nvmlProcessInfo_v3_t, sizeof(nvmlProcessInfo_v2_t)),
    STRUCTURE(nvmlProcessUtilizationSample_t, sizeof(nvmlProcessUtilizationSample_t)),
    STRUCTURE(nvmlFieldValue_t, sizeof(nvmlFieldValue_t)),
    STRUCTURE(nvmlEventData_t, sizeof(nvmlEventData_t)),
    STRUCTURE(nvmlGpmSupport_t, sizeof(nvmlGpmSupport_t)),
    STRUCTURE(nvmlGpmMetric_t, sizeof(nvmlGpmMetric_t)),
};

const char *nvmlFakeStructure(unsigned place, size_t *size);
const char *nvmlFakeStructure(unsigned place, size_t *size)
{
    if (place >= sizeof sizes / sizeof *sizes)
        return NULL;
    *size = sizes[place].size;
    return sizes[place].name;
}
