// SPDX-License-Identifier: Apache-2.0
//! The alarms of etcd. While it has one, it answers whoever reads, and refuses writes. An agent that only renews its lease does not notice that.

use etcd_client::{AlarmAction, AlarmType};

use super::EtcdStore;
use super::call_failure::NO_SPACE;
use crate::source::{Alarm, Error};

/// What to do about a database that differs between the members of a cluster.
const CORRUPT: &str = "see \"Data corruption\" in the operations guide of etcd: the member that differs is replaced, or etcd restored from a snapshot";

impl EtcdStore {
    /// Asks for the alarms. Nothing is changed.
    pub(super) async fn read_alarm(&self) -> Result<Option<Alarm>, Error> {
        let call = async |client: etcd_client::Client| {
            client.maintenance_client().alarm(AlarmAction::Get, AlarmType::None, None).await
        };
        let answer = self.pool.call("read the alarms", call).await?;
        Ok(answer.alarms().iter().find_map(|member| alarm(member.alarm())))
    }
}

fn alarm(kind: AlarmType) -> Option<Alarm> {
    let (what, remedy) = match kind {
        AlarmType::None => return None,
        AlarmType::Nospace => {
            ("it is full (alarm NOSPACE) and refuses all writes: no node gets a lease or writes one again", NO_SPACE)
        }
        AlarmType::Corrupt => ("its members have different data (alarm CORRUPT), and it refuses all writes", CORRUPT),
    };
    Some(Alarm { what: what.to_owned(), remedy: remedy.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_alarm_says_what_is_wrong_and_what_helps() {
        assert_eq!(alarm(AlarmType::None), None);
        let said = |kind, what: &str, remedy: &str| {
            alarm(kind).is_some_and(|alarm| alarm.what.contains(what) && alarm.remedy.contains(remedy))
        };
        assert!(said(AlarmType::Nospace, "it is full (alarm NOSPACE)", "etcdctl alarm disarm"));
        assert!(said(AlarmType::Corrupt, "different data (alarm CORRUPT)", "restored from a snapshot"));
    }
}
