// SPDX-License-Identifier: Apache-2.0
// libnvidia-ml.so.1 as far as vLLM's platform asks: one H100. See runtime.cpp.
#include <stdio.h>

struct Memory {
  unsigned long long total, free, used;
};
struct Memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
enum { NOT_SUPPORTED = 3 };
static const unsigned long long TOTAL = 80ull << 30, USED = 1ull << 30;
static int device;

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int error) { return "an error of the fake GPU"; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = 1, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { return index ? 2 : (*handle = &device, 0); }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) { return *handle = &device, 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) { return *handle = &device, 0; }
int nvmlDeviceGetIndex(void* handle, unsigned* index) { return *index = 0, 0; }
int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) { return *major = 9, *minor = 0, 0; }
int nvmlDeviceGetName(void* handle, char* name, unsigned size) { return snprintf(name, size, "FAKE H100 (no GPU)"), 0; }
int nvmlDeviceGetUUID(void* handle, char* uuid, unsigned size) {
  return snprintf(uuid, size, "GPU-01010101-0101-0101-0101-010101010101"), 0;
}
int nvmlDeviceGetMemoryInfo(void* handle, struct Memory* found) {
  return *found = (struct Memory){TOTAL, TOTAL - USED, USED}, 0;
}
int nvmlDeviceGetMemoryInfo_v2(void* handle, struct Memory2* found) {
  return *found = (struct Memory2){found->version, TOTAL, 0, TOTAL - USED, USED}, 0;
}
int nvmlDeviceGetP2PStatus(void* one, void* other, int kind, int* status) { return *status = 1, 0; }
int nvmlDeviceGetNumaNodeId(void* handle, unsigned* node) { return NOT_SUPPORTED; }
int nvmlDeviceGetCpuAffinity(void* handle, unsigned words, unsigned long* mask) { return NOT_SUPPORTED; }
int nvmlSystemGetDriverVersion(char* version, unsigned size) { return snprintf(version, size, "580.00"), 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void* handle, unsigned link, int* type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* handle, unsigned link, void* info) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* count, void* infos) { return *count = 0, 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, void* infos) { return *count = 0, 0; }
