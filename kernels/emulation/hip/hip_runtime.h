// The name that hipified files include.
#pragma once
#include "../emulation.h"
