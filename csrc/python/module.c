// `torch_paged_attn._launch`: what a repeated call needs of the host. It has no type `Starter`
// where there is no CUDA driver.
#include "python.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_launch", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__launch(void) {
  PyObject* module = PyModule_Create(&definition);
  if (!module || add_starter(module) || add_guard(module) || add_repeated(module)) {
    Py_XDECREF(module);
    return NULL;
  }
  return module;
}
