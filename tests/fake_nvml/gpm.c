/* GPU performance monitoring: two samples, and `Gpm.ID = VALUE` of their device as the metric between them. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>

struct gpm_sample {
    nvmlDevice_t device;
    unsigned number;
};

static unsigned taken;

NVML(GpmQueryDeviceSupport, nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    u64 found = 0;
    nvmlReturn_t code = numbers("nvmlGpmQueryDeviceSupport", device, "GpmQueryDeviceSupport", 0, 1, &found);
    support->supported = (unsigned)found;
    return code;
}

NVML(GpmSampleAlloc, nvmlGpmSample_t *sample)
{
    *sample = calloc(1, sizeof **sample);
    return answer("nvmlGpmSampleAlloc", NULL, NULL, NULL);
}

NVML(GpmSampleFree, nvmlGpmSample_t sample)
{
    free(sample);
    return answer("nvmlGpmSampleFree", NULL, NULL, NULL);
}

NVML(GpmSampleGet, nvmlDevice_t device, nvmlGpmSample_t sample)
{
    sample->device = device;
    sample->number = ++taken;
    return answer("nvmlGpmSampleGet", device, NULL, NULL);
}

NVML(GpmMetricsGet, nvmlGpmMetricsGet_t *get)
{
    if (get->version != 1)
        return ARGUMENT_VERSION_MISMATCH;
    if (!get->first || !get->second || !get->first->device || get->first->device != get->second->device)
        return INVALID_ARGUMENT;
    nvmlDevice_t device = get->first->device; /* the samples may be freed while the call hangs */
    char window[64];
    snprintf(window, sizeof window, "samples %u and %u", get->first->number, get->second->number);
    log_call(window);
    nvmlReturn_t code = answer("nvmlGpmMetricsGet", device, NULL, NULL);
    for (unsigned i = 0; !code && i < get->count; i++) {
        char key[32], text[MAX_TEXT];
        nvmlGpmMetric_t *metric = &get->metrics[i];
        snprintf(key, sizeof key, "Gpm.%u", metric->id);
        metric->result = answer("nvmlGpmMetricsGet", device, key, text);
        if (!metric->result)
            metric->value = strtod(text, NULL);
    }
    return code;
}
