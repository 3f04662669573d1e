// Reads the launches of a captured CUDA graph and launches them again with other parameters, see captured.py.

#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define MAX_LAUNCHES 256
#define MAX_EDGES 1024
#define MAX_OFFSETS 4096
#define MAX_WORDS 16384
#define MAX_PARAMETERS 128 // of a kernel
#define UNSUPPORTED (-1)

typedef struct {
    int is_kernel;
    CUlaunchConfig config;
    CUlaunchAttribute attributes[3];
    CUfunction function;
    CUDA_MEMSET_NODE_PARAMS memory;
    size_t first_word, first_offset, num_parameters;
} Launch;

typedef struct {
    size_t num_words; // the first fields, which Python reads
    uint64_t signature; // of the functions and their numbers of parameters
    uint64_t words[MAX_WORDS]; // parameters
    size_t num_launches, num_offsets;
    size_t offsets[MAX_OFFSETS]; // of each parameter, in bytes from the first word
    Launch launches[MAX_LAUNCHES];
} Captured;

size_t captured_bytes(void) { return sizeof(Captured); }

#define CHECK(call)                                                                                                                        \
    do {                                                                                                                                   \
        CUresult error = (call);                                                                                                           \
        if (error != CUDA_SUCCESS) return (int)error;                                                                                      \
    } while (0)

static int is_set(CUlaunchAttributeID kind, const CUlaunchAttributeValue *value) {
    if (kind == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) return value->cooperative != 0;
    return value->clusterDim.x > 1 || value->clusterDim.y > 1 || value->clusterDim.z > 1;
}

static int read_kernel(Captured *all, Launch *launch, CUgraphNode node, CUstream stream, int overlaps) {
    CUDA_KERNEL_NODE_PARAMS found;
    CHECK(cuGraphKernelNodeGetParams(node, &found));
    size_t offset, size, bytes = 0;
    char *content = (char *)(all->words + all->num_words);
    int is_function = found.func != NULL;
    launch->function = is_function ? found.func : (CUfunction)found.kern;
    void *block = NULL;
    for (void **pair = found.extra; pair && *pair && !block; pair += 2)
        if (*pair == CU_LAUNCH_PARAM_BUFFER_POINTER) block = pair[1];
    for (size_t i = 0;; i++) {
        CUresult end = is_function ? cuFuncGetParamInfo(found.func, i, &offset, &size) : cuKernelGetParamInfo(found.kern, i, &offset, &size);
        if (end != CUDA_SUCCESS && end != CUDA_ERROR_INVALID_VALUE && i == 0) return UNSUPPORTED;
        if (end != CUDA_SUCCESS) break; // there are no more
        if (i == MAX_PARAMETERS || all->num_offsets == MAX_OFFSETS) return UNSUPPORTED;
        if (all->num_words + (offset + size + 7) / 8 > MAX_WORDS) return UNSUPPORTED;
        if (!block && !found.kernelParams) return UNSUPPORTED;
        memset(content + bytes, 0, (offset + size + 7) / 8 * 8 - bytes);
        memcpy(content + offset, block ? (char *)block + offset : found.kernelParams[i], size);
        bytes = (offset + size + 7) / 8 * 8;
        all->offsets[all->num_offsets++] = 8 * all->num_words + offset;
        launch->num_parameters++;
    }
    all->num_words += bytes / 8;
    CUlaunchConfig config = {found.gridDimX,  found.gridDimY,       found.gridDimZ, found.blockDimX,    found.blockDimY,
                             found.blockDimZ, found.sharedMemBytes, stream,         launch->attributes, 0};
    CUlaunchAttributeID kinds[] = {CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION};
    for (int i = 0; i < 2; i++) {
        CUlaunchAttribute *attribute = &launch->attributes[config.numAttrs];
        memset(attribute, 0, sizeof *attribute);
        attribute->id = kinds[i];
        CUresult error = cuGraphKernelNodeGetAttribute(node, kinds[i], &attribute->value);
        if (error == CUDA_SUCCESS && is_set(kinds[i], &attribute->value)) config.numAttrs++;
    }
    if (overlaps) {
        CUlaunchAttribute *attribute = &launch->attributes[config.numAttrs++];
        memset(attribute, 0, sizeof *attribute);
        attribute->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute->value.programmaticStreamSerializationAllowed = 1;
    }
    launch->config = config;
    return 0;
}

static int read_memset(Captured *all, Launch *launch, CUgraphNode node) {
    CHECK(cuGraphMemsetNodeGetParams(node, &launch->memory));
    if (launch->memory.height != 1 || all->num_words == MAX_WORDS) return UNSUPPORTED;
    all->words[all->num_words++] = launch->memory.dst;
    return 0;
}

// Reads the graph after its first node, which only shows whether the second one may overlap with what precedes it. Nodes must be kernels and
// one-dimensional memsets in the order of their dependencies; this is how they are captured.
int captured_read(CUgraph graph, CUstream stream, Captured *all) {
    static CUgraphNode nodes[MAX_LAUNCHES], sources[MAX_EDGES], targets[MAX_EDGES];
    static CUgraphEdgeData data[MAX_EDGES];
    size_t num_nodes, num_edges;
    CHECK(cuGraphGetNodes(graph, NULL, &num_nodes));
    CHECK(cuGraphGetEdges_v2(graph, NULL, NULL, NULL, &num_edges));
    if (num_nodes > MAX_LAUNCHES || num_edges > MAX_EDGES) return UNSUPPORTED;
    CHECK(cuGraphGetNodes(graph, nodes, &num_nodes));
    CHECK(cuGraphGetEdges_v2(graph, sources, targets, data, &num_edges));
    all->num_words = all->num_launches = all->num_offsets = 0;
    all->signature = 14695981039346656037u; // FNV-1a
    for (size_t i = 1; i < num_nodes; i++) {
        int num_before = 0, overlaps = 0;
        for (size_t e = 0; e < num_edges; e++) {
            if (targets[e] != nodes[i]) continue;
            size_t source = 0;
            while (source < i && nodes[source] != sources[e]) source++;
            if (source == i) return UNSUPPORTED;
            overlaps = source == i - 1 && data[e].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
            num_before++;
        }
        CUgraphNodeType kind;
        CHECK(cuGraphNodeGetType(nodes[i], &kind));
        Launch *launch = &all->launches[all->num_launches++];
        memset(launch, 0, sizeof *launch);
        launch->is_kernel = kind == CU_GRAPH_NODE_TYPE_KERNEL;
        launch->first_word = all->num_words, launch->first_offset = all->num_offsets;
        int error = launch->is_kernel                      ? read_kernel(all, launch, nodes[i], stream, overlaps && num_before == 1)
                    : kind == CU_GRAPH_NODE_TYPE_MEMSET ? read_memset(all, launch, nodes[i])
                                                           : UNSUPPORTED;
        if (error) return error;
        uint64_t parts[] = {(uint64_t)(uintptr_t)launch->function, launch->num_parameters};
        for (int part = 0; part < 2; part++) all->signature = (all->signature ^ parts[part]) * 1099511628211u;
    }
    return 0;
}

static CUresult run_one(const Launch *launch, CUstream stream, void **parameters, CUdeviceptr target) {
    const CUDA_MEMSET_NODE_PARAMS *memory = &launch->memory;
    return launch->is_kernel          ? cuLaunchKernelEx(&launch->config, launch->function, parameters, NULL)
           : memory->elementSize == 1 ? cuMemsetD8Async(target, (unsigned char)memory->value, memory->width, stream)
           : memory->elementSize == 2 ? cuMemsetD16Async(target, (unsigned short)memory->value, memory->width, stream)
                                      : cuMemsetD32Async(target, memory->value, memory->width, stream);
}

// Launches with these words as parameters, which the driver copies. After an error, `problem` says what failed.
int captured_run(const Captured *all, CUstream stream, const uint64_t *words, char *problem, size_t size) {
    for (size_t n = 0; n < all->num_launches; n++) {
        const Launch *launch = &all->launches[n];
        const CUlaunchConfig *config = &launch->config;
        void *parameters[MAX_PARAMETERS];
        for (size_t i = 0; i < launch->num_parameters; i++) parameters[i] = (char *)words + all->offsets[launch->first_offset + i];
        CUresult error = run_one(launch, stream, parameters, launch->is_kernel ? 0 : words[launch->first_word]);
        if (error == CUDA_SUCCESS) continue;
        const char *name = "memset";
        if (launch->is_kernel && cuFuncGetName(&name, launch->function) != CUDA_SUCCESS) name = "?";
        snprintf(problem, size, "CUDA's error %d in launch %zu of %zu, %s: grid %u %u %u, block %u %u %u, %u bytes, %u attributes, width %zu",
                 (int)error, n, all->num_launches, name, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                 config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->numAttrs, launch->memory.width);
        return (int)error;
    }
    return 0;
}
