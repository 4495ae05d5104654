// SPDX-License-Identifier: Apache-2.0
//! ADD and DEL again and again, with plugins that are killed and delegates that fail.
