// The layout of llama.cpp's structures as its own compiler sees it, for a comparison with the binding's ctypes structures.

#include <stddef.h>
#include "llama.h"
#include "mtmd.h"

struct entry {
    const char * name;  // STRUCT or STRUCT.FIELD
    size_t offset;
    size_t size;
};

#define STRUCT(name) {#name, 0, sizeof(struct name)},
#define FIELD(name, field) {#name "." #field, offsetof(struct name, field), sizeof(((struct name *) 0)->field)},

__attribute__((visibility("default"))) const struct entry edgelm_abi[] = {
#include "fields.h"
    {NULL, 0, 0},
};

__attribute__((visibility("default"))) const struct entry edgelm_mtmd_abi[] = {
#include "mtmd_fields.h"
    {NULL, 0, 0},
};
