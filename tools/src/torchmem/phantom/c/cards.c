/* The cards of the machine: free memory, names, and which of them this process sees. */
#include "phantom.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

uint64_t card_bytes(void) { return model()->bytes; }

uint64_t card_free_bytes(int card)
{
    uint64_t used = bytes_on(card);
    return used < card_bytes() ? card_bytes() - used : 0;
}

void card_uuid(int card, unsigned char uuid[16])
{
    memcpy(uuid, "\0\0phantom-gpu\0\0\0", 16);
    uuid[0] = uuid[15] = (unsigned char)card;
    uuid[1] = (unsigned char)model()->machine;
}

void card_uuid_text(int card, char text[48])
{
    unsigned char id[16];
    card_uuid(card, id);
    int length = snprintf(text, 48, "GPU-");
    for (int byte = 0; byte < 16; byte++) {
        bool dash = byte == 4 || byte == 6 || byte == 8 || byte == 10;
        length += snprintf(text + length, 48 - (size_t)length, dash ? "-%02x" : "%02x", id[byte]);
    }
}

void card_pci_text(int card, char text[16])
{
    snprintf(text, 16, "0000:%02x:00.0", (unsigned char)(card + 1));
}

/* A unique prefix of the UUID is enough, as in CUDA_VISIBLE_DEVICES. Returns -1 if no card
 * matches. */
int card_with_uuid(const char *text)
{
    char uuid[48];
    for (int card = 0; card < card_count(); card++) {
        card_uuid_text(card, uuid);
        if (strncasecmp(uuid, text, strlen(text)) == 0)
            return card;
    }
    return -1;
}

static int visible[MAX_CARDS], visible_count;
static pthread_once_t listed = PTHREAD_ONCE_INIT;

static int card_named(const char *name)
{
    char *end;
    long index = strtol(name, &end, 10);
    if (strncasecmp(name, "GPU-", 4) == 0)
        return card_with_uuid(name);
    return end > name && index >= 0 && index < card_count() ? (int)index : -1;
}

/* As in the driver, an unknown name hides itself and all names after it. */
static void list_visible(void)
{
    char names[1024], *rest = names;
    const char *set = getenv("CUDA_VISIBLE_DEVICES");
    for (int card = 0; !set && card < card_count(); card++)
        visible[visible_count++] = card;
    snprintf(names, sizeof names, "%s", set ? set : "");
    for (char *name; set && visible_count < MAX_CARDS && (name = strsep(&rest, ","));) {
        int card = card_named(name);
        if (card < 0)
            return;
        visible[visible_count++] = card;
    }
}

int device_count(void)
{
    pthread_once(&listed, list_visible);
    return visible_count;
}

int card_of(int device) { return device >= 0 && device < device_count() ? visible[device] : -1; }

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* Takes the memory of a CUDA context, once. Returns false if the card has no room for it. */
bool open_context(int card)
{
    pthread_mutex_lock(&opening);
    bool open = process_bytes(card) > 0 || process_take(card, model()->context_bytes, card_bytes());
    pthread_mutex_unlock(&opening);
    return open;
}
