#include "attention_plan.h"
