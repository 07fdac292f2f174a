// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a GPU (libcuda.so.1), as far as Triton, torch and vLLM ask for one by name: see runtime.cpp.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#define API extern "C" __attribute__((visibility("default"))) int
#define SUCCEEDS(name) \
  API name() { return 0; }
#define SETS(name, type, value) \
  API name(type* answer) {      \
    *answer = value;            \
    return 0;                   \
  }

extern "C" int fake_attribute(int);  // of the runtime, which is there first
namespace {
void* const kContext = reinterpret_cast<void*>(0x1234);
}

SETS(cuDriverGetVersion, int, 13000)
SETS(cuDeviceGetCount, int, 1)
SETS(cuCtxGetCurrent, void*, kContext)
SETS(cuCtxGetDevice, int, 0)
SETS(cuCtxGetLimit, size_t, 1 << 20)
SETS(cuDevicePrimaryCtxRetain, void*, kContext)
SETS(cuModuleLoadData, void*, malloc(8))
SETS(cuModuleLoadDataEx, void*, malloc(8))
SETS(cuModuleLoad, void*, malloc(8))
SETS(cuModuleGetFunction, void*, malloc(8))
SETS(cuOccupancyMaxActiveClusters, int, 16)
SETS(cuOccupancyMaxActiveBlocksPerMultiprocessor, int, 2)
SETS(cuMemGetAllocationGranularity, size_t, 2 << 20)
SETS(cuMemCreate, void*, malloc(8))

API cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}
API cuDeviceGetName(char* name, int size, int) {
  snprintf(name, size, "FAKE H100 (no GPU)");
  return 0;
}
API cuDeviceGetUuid(void* uuid, int) {
  memset(uuid, 1, 16);
  return 0;
}
API cuDeviceGetUuid_v2(void* uuid, int) { return cuDeviceGetUuid(uuid, 0); }
API cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = fake_attribute(attribute);
  return 0;
}
API cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = 80ull << 30;
  return 0;
}
API cuMemGetInfo_v2(size_t* free_bytes, size_t* all) {
  *free_bytes = 70ull << 30;
  *all = 80ull << 30;
  return 0;
}
API cuCtxPopCurrent_v2(void** context) {
  if (context) *context = kContext;
  return 0;
}
API cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
API cuModuleGetGlobal_v2(void** pointer, size_t* bytes, void*, const char*) {
  *pointer = calloc(1, 4096);
  if (bytes) *bytes = 4096;
  return 0;
}
API cuFuncGetAttribute(int* value, int attribute, void*) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
  return 0;
}
API cuPointerGetAttribute(void* data, int attribute, uintptr_t pointer) {
  if (attribute == 3)
    *static_cast<uintptr_t*>(data) = pointer;
  else
    *static_cast<unsigned*>(data) = attribute == 2 ? 2 : 0;
  return 0;
}
API cuPointerGetAttributes(unsigned count, int* attributes, void** data, uintptr_t pointer) {
  for (unsigned index = 0; index < count; ++index) cuPointerGetAttribute(data[index], attributes[index], pointer);
  return 0;
}
API cuGetErrorString(int, const char** text) {
  *text = "an error of the fake GPU";
  return 0;
}
API cuGetErrorName(int, const char** text) { return cuGetErrorString(0, text); }

API cuMemcpyDtoH_v2(void* to, uintptr_t from, size_t bytes) {
  memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}
API cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t bytes) {
  memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
API cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void*) {
  memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return 0;
}
API cuMemsetD8Async(uintptr_t at, unsigned char value, size_t bytes, void*) {
  memset(reinterpret_cast<void*>(at), value, bytes);
  return 0;
}
API cuMemsetD32Async(uintptr_t at, unsigned value, size_t count, void*) {
  for (size_t index = 0; index < count; ++index) reinterpret_cast<unsigned*>(at)[index] = value;
  return 0;
}
API cuStreamWriteValue32_v2(void*, uintptr_t at, unsigned value, unsigned) {
  *reinterpret_cast<unsigned*>(at) = value;
  return 0;
}
API cuTensorMapEncodeTiled(void* map, ...) {
  memset(map, 0, 128);
  return 0;
}
API cuTensorMapEncodeIm2col(void* map, ...) {
  memset(map, 0, 128);
  return 0;
}
API cuMemAddressReserve(uintptr_t* at, size_t bytes, size_t, uintptr_t, unsigned long long) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *at = reinterpret_cast<uintptr_t>(made);
  return 0;
}
API cuMemAddressFree(uintptr_t at, size_t bytes) { return munmap(reinterpret_cast<void*>(at), bytes); }

SUCCEEDS(cuInit) SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxPushCurrent) SUCCEEDS(cuCtxPushCurrent_v2)
SUCCEEDS(cuCtxPopCurrent) SUCCEEDS(cuCtxSynchronize) SUCCEEDS(cuCtxSetLimit) SUCCEEDS(cuDevicePrimaryCtxRelease_v2)
SUCCEEDS(cuModuleUnload) SUCCEEDS(cuFuncSetAttribute) SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuLaunchKernel) SUCCEEDS(cuLaunchKernelEx) SUCCEEDS(cuLaunchCooperativeKernel)
SUCCEEDS(cuStreamSynchronize) SUCCEEDS(cuStreamWaitEvent) SUCCEEDS(cuStreamWriteValue32)
SUCCEEDS(cuStreamWaitValue32) SUCCEEDS(cuStreamWaitValue32_v2)
SUCCEEDS(cuMemMap) SUCCEEDS(cuMemUnmap) SUCCEEDS(cuMemRelease) SUCCEEDS(cuMemSetAccess)
SUCCEEDS(cuMemExportToShareableHandle) SUCCEEDS(cuMemImportFromShareableHandle)
SUCCEEDS(cuMemGetAllocationPropertiesFromHandle) SUCCEEDS(cuMemRetainAllocationHandle)
SUCCEEDS(cuMemHostRegister_v2) SUCCEEDS(cuMemHostUnregister)
SUCCEEDS(cuMulticastAddDevice) SUCCEEDS(cuMulticastBindMem) SUCCEEDS(cuMulticastCreate) SUCCEEDS(cuMulticastUnbind)
SUCCEEDS(cuGreenCtxCreate) SUCCEEDS(cuGreenCtxDestroy) SUCCEEDS(cuGreenCtxStreamCreate) SUCCEEDS(cuCtxFromGreenCtx)
SUCCEEDS(cuDevResourceGenerateDesc) SUCCEEDS(cuDevSmResourceSplitByCount) SUCCEEDS(cuDeviceGetDevResource)
SUCCEEDS(cuLinkAddData_v2) SUCCEEDS(cuLinkComplete) SUCCEEDS(cuLinkCreate_v2) SUCCEEDS(cuLinkDestroy)

API cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* result) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *function = dlsym(driver ? driver : RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(driver ? driver : RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (result) *result = *function ? 0 : 1;
  return *function ? 0 : 500;
}
