// SPDX-License-Identifier: Apache-2.0
//! A backend whose identity is a key pair in a file: the file is the truth, and the lease follows it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use weft_backends::backend::Planned;
use weft_backends::host::Host;
use weft_backends::identity::Identity;
use weft_backends::state::{Mac, Name, State};
use weft_subnet::backend_types::PublicIdentity;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;

use super::*;
use crate::kernel::LinkInfo;
use crate::lease::acquire::secret_files::{MAX_SIZE, SecretFiles};

/// The public key of a private one, for these tests: its length.
struct Key(Vec<u8>);

impl Identity for Key {
    fn public(&self) -> PublicIdentity {
        PublicIdentity::new("keyed", format_args!("key of {} bytes", self.0.len()))
    }
    fn name(&self) -> &'static str {
        "PublicKey"
    }
    fn remedy(&self) -> &'static str {
        "delete the key file and restart the agent"
    }
}

/// Keeps its key in the directory of `--state-dir`.
struct Keyed;

impl Keyed {
    fn read(found: &Found<'_>) -> Result<Option<Vec<u8>>, Skip> {
        let directory = found.secrets.directory().ok_or_else(|| Skip::new(io::Error::other("give --state-dir")))?;
        found.secrets.read(&directory.join("key")).map_err(Skip::new)
    }
}

impl Backend for Keyed {
    fn kind(&self) -> &'static str {
        "keyed"
    }
    fn mtu(&self, host: &Host, _: Family) -> u32 {
        host.uplink.mtu
    }
    fn standing_identities(&self, found: &Found<'_>) -> Result<PublicIdentities, Skip> {
        Ok([Keyed::read(found)?.map(|key| Key(key).public()), None])
    }
    fn identities(&self, found: &Found<'_>, _: Option<&Attrs>) -> Result<Identities, Skip> {
        let key = match Keyed::read(found)? {
            Some(key) => key,
            None => {
                let mut key = vec![0; 32];
                let file = found.secrets.directory().unwrap_or(Path::new("")).join("key");
                let made = (found.random)(&mut key).and_then(|()| found.secrets.create(&file, &key));
                made.map_err(Skip::new)?;
                key
            }
        };
        Ok(Identities::new(Some(Arc::new(Key(key))), None))
    }
    fn advertise(&self, _: &Host) -> Result<Attrs, Skip> {
        Ok(Attrs::default())
    }
    fn device(&self, _: &Host, _: &Lease) -> State {
        State::new()
    }
    fn plan(&self, _: &Host, _: &Lease, _: &Lease) -> Planned {
        Planned::default()
    }
}

#[test]
fn a_key_in_a_file_is_made_once_and_then_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("made/by/us");
    let (machine, secrets) = (Machine::default(), SecretFiles::new(Some(&state)));
    assert_eq!(standing(&Keyed, &machine, &secrets), Ok([None, None]), "nothing shows which lease is ours");
    let made = chosen(&Keyed, &machine, Kept { secrets: &secrets, printed: None }, None).unwrap();
    let meta = fs::metadata(state.join("key")).unwrap();
    assert_eq!((meta.len(), meta.permissions().mode() & 0o777), (32, 0o600));
    let key = fs::read(state.join("key")).unwrap();
    assert!(key.iter().any(|byte| *byte != 0), "random bytes");
    assert_eq!(standing(&Keyed, &machine, &secrets), Ok(made.public()));
    assert_eq!(chosen(&Keyed, &machine, Kept { secrets: &secrets, printed: None }, None), Ok(made.clone()));
    assert_eq!(fs::read(state.join("key")).unwrap(), key);
    assert_eq!(Keyed.follow(&made, &Attrs::default()), made, "the lease follows the file");
    assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "nothing is left beside the file");
}

#[test]
fn a_secret_that_cannot_be_read_is_an_error_and_not_a_new_secret() {
    let dir = tempfile::tempdir().unwrap();
    let (machine, secrets) = (Machine::default(), SecretFiles::new(Some(dir.path())));
    fs::create_dir(dir.path().join("key")).unwrap();
    for error in [
        standing(&Keyed, &machine, &secrets).unwrap_err(),
        chosen(&Keyed, &machine, Kept { secrets: &secrets, printed: None }, None).unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "it is not a regular file: remove it");
    }
    fs::remove_dir(dir.path().join("key")).unwrap();
    fs::write(dir.path().join("key"), vec![0; MAX_SIZE as usize + 1]).unwrap();
    assert_eq!(standing(&Keyed, &machine, &secrets).unwrap_err().to_string(), "it is larger than any key");
}

/// A device of another agent belongs to that agent; one of flannel is adopted, but proves nothing.
#[test]
fn a_device_counts_by_who_made_it() {
    let name = Name::new("flannel.1").unwrap();
    let net_conf = weft_subnet::net_conf::NetConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#);
    let vxlan = weft_backends::register::make(&net_conf.unwrap()).unwrap();
    let mac = Mac([2, 0, 0, 0, 0, 7]);
    let machine = |creator| {
        let (up, carrier, loopback) = (true, true, false);
        let link = LinkInfo { index: 2, name, mtu: 1450, mac: Some(mac), up, carrier, loopback, creator };
        Machine { links: vec![link], ..Machine::default() }
    };
    let secrets = SecretFiles::default();
    let ours = Some(PublicIdentity::new("vxlan", mac));
    for (creator, proves, adopted) in
        [(Creator::ThisAgent, true, true), (Creator::Unknown, false, true), (Creator::AnotherAgent, false, false)]
    {
        let [standing, _] = standing(&*vxlan, &machine(creator), &secrets).unwrap();
        assert_eq!(standing == ours, proves, "{creator:?}");
        let [mac, v6] =
            chosen(&*vxlan, &machine(creator), Kept { secrets: &secrets, printed: None }, None).unwrap().public();
        assert_eq!(mac == ours, adopted, "{creator:?}");
        assert!(mac.is_some() && v6.is_some() && mac != v6);
        let data = r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:09"}"#;
        let lease = Attrs { backend_type: "vxlan".into(), backend_data: Some(data.into()), ..Attrs::default() };
        let [mac, _] = chosen(&*vxlan, &machine(creator), Kept { secrets: &secrets, printed: None }, Some(&lease))
            .unwrap()
            .public();
        assert_eq!(mac.unwrap().to_string(), "02:00:00:00:00:09", "peers know the MAC of the lease");
    }
}
