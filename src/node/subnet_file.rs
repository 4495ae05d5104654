// SPDX-License-Identifier: Apache-2.0
//! subnet.env as part of what this node wants: written when the data path can carry what it promises.

use weft_subnet::env::SubnetEnv;

use super::Node;
use crate::files;
use crate::kernel::Kernel;
use crate::observe::report;
use crate::subnet_file;

impl<K: Kernel> Node<K> {
    /// Writes subnet.env when it does not say what it should: only while our device is up.
    pub fn publish_env(&mut self) {
        if report::device_problem(self).is_some() || self.kernel_problem.is_some() {
            return;
        }
        // The container runtime must not masquerade what we will, nor the reverse.
        let Some(ipmasq) = self.ipmasq() else { return };
        let file = &self.world.options.subnet_file;
        // The MTU is known only with the peers (their backends count): until then what an earlier run wrote stays.
        let granted = |text: String| SubnetEnv::parse(&text).is_some_and(|env| env.subnets == self.plan.own().subnets);
        if !self.knows_peers() && files::read_text(file).is_ok_and(granted) {
            return;
        }
        let text = SubnetEnv { ipmasq, ..self.plan.env() }.render();
        match subnet_file::write(file, text.as_bytes()) {
            Ok(true) => {
                tracing::info!(file = %file.display(), mtu = self.plan.mtu(), "subnet.env written");
                self.env_problem = None;
            }
            Ok(false) => self.env_problem = None,
            Err(error) => {
                let text = format!("write {}: {error}", file.display());
                tracing::error!("{text}");
                self.env_problem = Some(text);
            }
        }
    }
}
