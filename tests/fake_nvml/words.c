/* The words of a value: return codes, numbers, lists of them. */
#include "state.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct {
    const char *word;
    int code;
} codes[] = {
    {"hang", HANG},
    {"success", 0},
    {"uninitialized", 1},
    {"invalid_argument", 2},
    {"not_supported", 3},
    {"-", 3},
    {"no_permission", 4},
    {"not_found", 6},
    {"insufficient_size", 7},
    {"driver_not_loaded", 9},
    {"timeout", 10},
    {"function_not_found", 13},
    {"gpu_is_lost", 15},
    {"reset_required", 16},
    {"operating_system", 17},
    {"lib_rm_version_mismatch", 18},
    {"no_data", 21},
    {"argument_version_mismatch", 25},
    {"not_ready", 27},
    {"unknown", 999},
};

int code_of(const char *word, size_t length)
{
    if (length && *word == '#')
        return atoi(word + 1);
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (strlen(codes[i].word) == length && !strncmp(codes[i].word, word, length))
            return codes[i].code;
    return NOT_A_CODE;
}

/* The word at a place of a list. `7*18` is eighteen times 7. */
static size_t word_at(const char *text, unsigned place, const char **word)
{
    while (*(text += strspn(text, " ,"))) {
        size_t length = strcspn(text, " ,");
        const char *star = memchr(text, '*', length);
        unsigned times = star ? (unsigned)strtoul(star + 1, NULL, 10) : 1;
        if (place < times) {
            *word = text;
            return star ? (size_t)(star - text) : length;
        }
        place -= times;
        text += length;
    }
    return 0;
}

nvmlReturn_t numbers(const char *function, nvmlDevice_t device, const char *key, unsigned first, unsigned count,
                     u64 *found)
{
    char text[MAX_TEXT];
    nvmlReturn_t code = answer(function, device, key, text);
    for (unsigned i = 0; !code && i < count; i++) {
        const char *word;
        size_t length = word_at(text, first + i, &word);
        int error = length ? code_of(word, length) : INVALID_ARGUMENT;
        code = error == NOT_A_CODE ? SUCCESS : error;
        found[i] = code ? 0 : strtoull(word, NULL, 0);
    }
    return code;
}

nvmlReturn_t give_text(const char *function, nvmlDevice_t device, const char *key, char *buffer, unsigned length)
{
    char text[MAX_TEXT];
    nvmlReturn_t code = answer(function, device, key, text);
    if (!code && strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    if (!code)
        strcpy(buffer, text);
    return code;
}

bool row(const char *text, unsigned place, u64 fields[MAX_ROW], unsigned *count)
{
    const char *word = NULL;
    size_t length = word_at(text, place, &word);
    const char *end = word + length;
    for (*count = 0; length && word < end && *count < MAX_ROW; word += strcspn(word, ": ,") + 1) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        u64 microseconds = (u64)now.tv_sec * 1000000 + (u64)now.tv_nsec / 1000;
        bool is_now = !strncmp(word, "now", 3);
        fields[(*count)++] = is_now ? microseconds : *word == '-' ? ~0ull : strtoull(word, NULL, 0);
    }
    return length;
}
