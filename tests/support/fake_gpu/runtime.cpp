// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime without a GPU, to be loaded before torch's own: the memory of its one device is memory that processes
// share, copies are made at once, kernels compute nothing, a graph takes as long as FAKE_GPU_STEP_US says. Programs that
// use a GPU run over it from their beginning to their end; what kernels would have computed is not there.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#define API extern "C" __attribute__((visibility("default")))
#define SUCCEEDS(name, ...) \
  API cudaError_t name(__VA_ARGS__) { return cudaSuccess; }

namespace {

constexpr size_t kGranularity = 2 << 20;
constexpr size_t kReserved = 1ull << 30;  // by a driver that is none

struct Memory {
  size_t bytes;
  int descriptor;  // of device memory that this process has made; otherwise -1
  bool on_device;
};

std::recursive_mutex lock;
std::map<uintptr_t, Memory> memories;  // by their first address
std::set<void*> capturing;
size_t used = 0;
thread_local int current_device = 0;

using Locked = std::lock_guard<std::recursive_mutex>;

size_t from_environment(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

size_t total() {
  static const size_t bytes = from_environment("FAKE_GPU_BYTES", 80ull << 30);
  return bytes;
}

void* mapped(int descriptor, size_t bytes) {
  const int private_too = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_NORESERVE;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, private_too, descriptor, 0);
  return at == MAP_FAILED ? nullptr : at;
}

// The memory in which an address lies, or the end.
std::map<uintptr_t, Memory>::iterator around(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto found = memories.upper_bound(address);
  if (found == memories.begin()) return memories.end();
  --found;
  return address < found->first + found->second.bytes ? found : memories.end();
}

cudaError_t let_go(void* pointer) {
  Locked locked(lock);
  auto found = memories.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == memories.end()) return cudaSuccess;
  munmap(pointer, found->second.bytes);
  if (found->second.descriptor >= 0) {
    close(found->second.descriptor);
    used -= found->second.bytes;
  }
  memories.erase(found);
  return cudaSuccess;
}

template <typename Handle>
cudaError_t made(Handle* handle) {
  *handle = reinterpret_cast<Handle>(new double(0));  // an event's time; for others, an address
  return cudaSuccess;
}

double milliseconds() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// Memory

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Locked locked(lock);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  if (used + bytes > total()) return cudaErrorMemoryAllocation;
  // Memory without a name: the kernel frees it with the last process that has it, however that ends.
  const int descriptor = memfd_create("fake-gpu", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, bytes)) return cudaErrorMemoryAllocation;
  *pointer = mapped(descriptor, bytes);
  if (*pointer == nullptr) return cudaErrorMemoryAllocation;
  used += bytes;
  memories[reinterpret_cast<uintptr_t>(*pointer)] = {bytes, descriptor, true};
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
API cudaError_t cudaFree(void* pointer) { return let_go(pointer); }
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return let_go(pointer); }
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  bytes = bytes ? bytes : 1;
  *pointer = mapped(-1, bytes);
  if (*pointer == nullptr) return cudaErrorMemoryAllocation;
  Locked locked(lock);
  memories[reinterpret_cast<uintptr_t>(*pointer)] = {bytes, -1, false};
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* pointer) { return let_go(pointer); }
API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Locked locked(lock);
  memories[reinterpret_cast<uintptr_t>(pointer)] = {bytes, -1, false};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  Locked locked(lock);
  memories.erase(reinterpret_cast<uintptr_t>(pointer));
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** there, void* here, unsigned) {
  *there = here;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Locked locked(lock);
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -2;
  const auto found = around(pointer);
  if (found == memories.end()) return cudaSuccess;
  attributes->type = found->second.on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = 0;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = found->second.on_device ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all) {
  Locked locked(lock);
  *all = total();
  *free_bytes = total() > used + kReserved ? total() - used - kReserved : total() - used;
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memmove(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row)
    memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  memset(at, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) { return cudaMemset(at, value, bytes); }
SUCCEEDS(cudaMemcpyToSymbol, const void*, const void*, size_t, size_t, cudaMemcpyKind)
API cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char zeros[1 << 16];
  *pointer = zeros;
  return cudaSuccess;
}

// Memory of another process. A handle is the path of the creator's descriptor; it ends with the creator.

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  Locked locked(lock);
  *handle = {};
  const auto found = around(pointer);
  if (found == memories.end() || found->second.descriptor < 0) return cudaErrorInvalidValue;
  snprintf(handle->reserved, sizeof handle->reserved, "/proc/%d/fd/%d", getpid(), found->second.descriptor);
  return cudaSuccess;
}
API cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned) {
  const int descriptor = open(handle.reserved, O_RDWR | O_CLOEXEC);
  struct stat found;
  if (descriptor < 0 || fstat(descriptor, &found)) return cudaErrorInvalidValue;
  *pointer = mapped(descriptor, found.st_size);
  close(descriptor);
  if (*pointer == nullptr) return cudaErrorInvalidValue;
  Locked locked(lock);
  memories[reinterpret_cast<uintptr_t>(*pointer)] = {static_cast<size_t>(found.st_size), -1, true};
  return cudaSuccess;
}
API cudaError_t cudaIpcCloseMemHandle(void* pointer) { return let_go(pointer); }
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t) {
  *handle = {};
  return cudaSuccess;
}
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t) { return made(event); }

// The device: an H100

API int fake_attribute(int attribute) {
  static const std::map<int, int> values = {
      {1, 1024},    {2, 1024},    {3, 1024},     {4, 64},      {5, 2147483647}, {6, 65535},   {7, 65535}, {8, 49152},
      {10, 32},     {12, 65536},  {13, 1980000}, {16, 132},    {36, 2619000},   {37, 5120},   {38, 50 << 20},
      {39, 2048},   {41, 1},      {75, 9},       {76, 0},      {81, 233472},    {82, 65536},  {95, 1},    {97, 232448},
      {102, 1},     {106, 32},    {111, 1024},   {115, 1},     {116, 1}};
  const auto found = values.find(attribute);
  return found == values.end() ? 0 : found->second;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = fake_attribute(attribute);
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int) {
  *device = {};
  strcpy(device->name, "FAKE H100 (no GPU)");
  memset(&device->uuid, 1, sizeof device->uuid);
  device->totalGlobalMem = total();
  device->major = 9;
  device->multiProcessorCount = 132;
  device->sharedMemPerBlock = 49152;
  device->sharedMemPerBlockOptin = 232448;
  device->sharedMemPerMultiprocessor = 233472;
  device->regsPerBlock = device->regsPerMultiprocessor = 65536;
  device->warpSize = 32;
  device->maxThreadsPerBlock = 1024;
  device->maxThreadsPerMultiProcessor = 2048;
  device->maxBlocksPerMultiProcessor = 32;
  device->maxThreadsDim[0] = device->maxThreadsDim[1] = 1024;
  device->maxThreadsDim[2] = 64;
  device->maxGridSize[0] = 2147483647;
  device->maxGridSize[1] = device->maxGridSize[2] = 65535;
  device->l2CacheSize = 50 << 20;
  device->persistingL2CacheMaxSize = 32 << 20;
  device->memoryBusWidth = 5120;
  device->totalConstMem = 65536;
  device->unifiedAddressing = device->canMapHostMemory = device->concurrentKernels = device->cooperativeLaunch = 1;
  return cudaSuccess;
}
#define ANSWERS(name, type, value)    \
  API cudaError_t name(type* answer) { \
    *answer = value;                   \
    return cudaSuccess;                \
  }
ANSWERS(cudaGetDeviceCount, int, 1)
ANSWERS(cudaGetDevice, int, current_device)
ANSWERS(cudaDriverGetVersion, int, 13000)
ANSWERS(cudaRuntimeGetVersion, int, 13000)
API cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}
SUCCEEDS(cudaDeviceSynchronize)
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
SUCCEEDS(cudaDeviceEnablePeerAccess, int, unsigned)
API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int) {
  snprintf(id, size, "0000:00:00.0");
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return made(pool); }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  memset(value, 0, 8);
  return cudaSuccess;
}
SUCCEEDS(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
SUCCEEDS(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
SUCCEEDS(cudaMemPoolTrimTo, cudaMemPool_t, size_t)

// Streams and events: all is done when it has been asked for.

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return made(stream); }
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return made(stream); }
SUCCEEDS(cudaStreamDestroy, cudaStream_t)
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
SUCCEEDS(cudaStreamQuery, cudaStream_t)
SUCCEEDS(cudaStreamSynchronize, cudaStream_t)
SUCCEEDS(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) {
  call(data);
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return made(event); }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return made(event); }
SUCCEEDS(cudaEventDestroy, cudaEvent_t)
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<double*>(event) = milliseconds();
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
SUCCEEDS(cudaEventQuery, cudaEvent_t)
SUCCEEDS(cudaEventSynchronize, cudaEvent_t)
API cudaError_t cudaEventElapsedTime(float* taken, cudaEvent_t from, cudaEvent_t to) {
  const double found = *reinterpret_cast<double*>(to) - *reinterpret_cast<double*>(from);
  *taken = found > 0 ? static_cast<float>(found) : 1e-3f;
  return cudaSuccess;
}

// Graphs: nothing is recorded, and a launch takes its time.

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Locked locked(lock);
  capturing.insert(stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Locked locked(lock);
  capturing.erase(stream);
  return made(graph);
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Locked locked(lock);
  *status = capturing.count(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  static double nothing;
  if (id) *id = 1;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(&nothing);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
SUCCEEDS(cudaThreadExchangeStreamCaptureMode, cudaStreamCaptureMode*)
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* graph, cudaGraph_t, unsigned long long) {
  return made(graph);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  static const size_t taken = from_environment("FAKE_GPU_STEP_US", 0);
  if (taken) usleep(taken);
  return cudaSuccess;
}
SUCCEEDS(cudaGraphDestroy, cudaGraph_t)
SUCCEEDS(cudaGraphExecDestroy, cudaGraphExec_t)
SUCCEEDS(cudaGraphDebugDotPrint, cudaGraph_t, const char*, unsigned)
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}

// Kernels

SUCCEEDS(cudaLaunchKernel, const void*, dim3, dim3, void**, size_t, cudaStream_t)
SUCCEEDS(cudaLaunchCooperativeKernel, const void*, dim3, dim3, void**, size_t, cudaStream_t)
SUCCEEDS(cudaLaunchKernelExC, const cudaLaunchConfig_t*, const void*, void**)
SUCCEEDS(__cudaLaunchKernel, cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t)
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->numRegs = 32;
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
SUCCEEDS(cudaFuncSetAttribute, const void*, cudaFuncAttribute, int)
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
SUCCEEDS(cudaProfilerStart)
SUCCEEDS(cudaProfilerStop)
SUCCEEDS(cudaGetLastError)
SUCCEEDS(cudaPeekAtLastError)
API const char* cudaGetErrorString(cudaError_t) { return "an error of the fake GPU"; }
API const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }

// The driver, by the names of its functions: `driver.cpp`

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function && driver) *function = dlsym(driver, (std::string(name) + "_v2").c_str());
  if (!*function) fprintf(stderr, "fake GPU: there is no driver function %s\n", name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                        cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 13000, flags, result);
}

// What nvcc's code calls when a library with kernels is loaded, and at a launch

namespace {
thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configuration;
}  // namespace
API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}
